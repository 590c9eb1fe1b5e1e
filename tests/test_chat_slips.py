"""What a person may type wrongly in a chat without losing anything."""

import json
import os
from itertools import islice
from types import SimpleNamespace

import pytest
from test_chat import roles, say, small_chat, told

from dflash_mlx.cli.chat_line import KeptHistory, Line
from dflash_mlx.cli.chat_loop import Chat
from dflash_mlx.errors import WeightsError
from dflash_mlx.loop import stream_generate


@pytest.fixture
def chat() -> Chat:
    """As `test_chat` has one."""
    return small_chat()


@pytest.mark.parametrize("name", ["pipe", "folder"])
def test_what_is_no_file_is_not_replaced_by_a_conversation(name, chat, capsys, tmp_path):
    """As root /dev/full was."""
    place = tmp_path / name
    os.mkfifo(place) if name == "pipe" else place.mkdir()
    assert "is not a file" in told(chat, capsys, f"/save {place}")
    assert not place.is_file()


@pytest.mark.parametrize(
    "line", ["/set top-p 0.5", "/set top_p=0.5", "/set --top-p 0.5", "/set Top_P 0.5"]
)
def test_a_setting_may_be_spelled_as_on_the_command_line(line, chat, capsys):
    say(chat, "/set temperature 0.8")
    assert "top_p        0.5" in told(chat, capsys, line)
    assert chat.dialogue.settings["top_p"] == 0.5


def typing(history, *texts):
    """A line of somebody who types these, and then Ctrl-D."""
    line, typed = Line.__new__(Line), iter(texts)

    def prompt(*_, **__):
        for text in typed:
            return text
        raise EOFError

    line._session, line._history = SimpleNamespace(prompt=prompt), KeptHistory(history)
    return line


@pytest.mark.parametrize("texts", [['"""a', "b"], ["a\\"], ["a\\", "b\\"]])
def test_ctrl_d_in_a_message_gives_up_that_and_not_the_chat(tmp_path, texts):
    line = typing(tmp_path / "history", *texts)
    with pytest.raises(KeyboardInterrupt):
        line.read()
    with pytest.raises(EOFError):
        line.read()


def test_a_message_of_several_lines_is_gone_back_to_in_one_piece(tmp_path):
    history = tmp_path / "history"
    line = typing(history, "a\\", "b", '"""c\\', 'd"""', "e", "e", "\udcff", '"""f', "g")
    assert [line.read() for _ in range(4)] == ["a\nb", "c\\\nd", "e", "e"]
    with pytest.raises(UnicodeError):
        line.read()
    with pytest.raises(KeyboardInterrupt):
        line.read()
    assert list(KeptHistory(history).load_history_strings()) == ["f\ng", "e", "c\\\nd", "a\nb"]


def test_a_retry_that_does_not_fit_any_more_loses_nothing(chat, capsys):
    say(chat, "hi", "/set seed 7", f"/system {'be nice ' * 40}")
    before = [*chat.dialogue.messages]
    heard = told(chat, capsys, "/retry")
    assert "/clear starts a new conversation." in heard and heard.count("error: ") == 1
    assert chat.dialogue.messages == before and chat.dialogue.settings["seed"] == 7
    say(chat, "/system none", "/retry")
    assert roles(chat) == ["user", "assistant"] and chat.dialogue.settings["seed"] == 8


def test_an_answer_that_fails_midway_leaves_the_one_before_it(chat, capsys, monkeypatch):
    say(chat, "hi", "ho")
    before, last = [*chat.dialogue.messages], chat.dialogue.last

    def fails(*arguments, **settings):
        yield from islice(stream_generate(*arguments, **settings), 2)
        raise WeightsError("The disk is gone.")

    monkeypatch.setattr("dflash_mlx.stream_generate", fails)
    for line in ("/retry", "hm"):
        assert "error: The disk is gone.\n" in told(chat, capsys, line)
        assert chat.dialogue.messages == before and chat.dialogue.last is last


def test_a_file_that_is_no_conversation_is_not_replaced(chat, tmp_path, capsys):
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    assert "no saved conversation: give another name" in told(chat, capsys, "hi", f"/save {notes}")
    assert notes.read_text() == "precious"
    talk = tmp_path / "talk.json"
    say(chat, f"/save {talk}", "ho", f"/save {talk}")  # an older state of it is
    assert json.loads(talk.read_text())["messages"] == chat.dialogue.messages


def test_undo_brings_back_what_a_load_replaced(chat, tmp_path, capsys):
    file = tmp_path / "talk.json"
    say(chat, "hi", f"/save {file}", "/clear", "ho", "hm")
    replaced = chat.dialogue.messages
    heard = told(chat, capsys, f"/load {file}")
    assert "2 messages loaded. /undo goes back to the 4 messages from before." in heard
    assert f"The last one: {chat.dialogue.messages[-1]['content'].split()[0]}" in heard
    assert "before /load" in told(chat, capsys, "/undo") and chat.dialogue.messages == replaced
    say(chat, "/undo")
    assert chat.dialogue.messages == replaced[:2], "from here on it is the usual one"


def test_undo_ends_after_a_load_of_the_very_conversation(chat, tmp_path):
    file = tmp_path / "talk.json"
    say(chat, "hi", f"/save {file}", f"/load {file}", "/undo")
    assert len(chat.dialogue.messages) == 2, "as it was before the load"
    say(chat, "/undo")
    assert not chat.dialogue.messages


def test_undo_after_a_question_takes_that_back_first(chat, tmp_path, capsys):
    file = tmp_path / "talk.json"
    say(chat, "hi", f"/save {file}", "ho", f"/load {file}", "hm", "/undo")
    assert roles(chat) == ["user", "assistant"] and chat.dialogue.messages[0]["content"] == "hi"
    say(chat, "/undo")
    assert chat.dialogue.messages[2]["content"] == "ho"
    fresh = told(chat, capsys, "/clear", f"/load {file}")
    assert "1 message" not in fresh and "/undo" not in fresh, "nothing was replaced"


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"messages": [{"role": "cook", "content": "x"}]}', "\xff"]
)
def test_what_cannot_be_loaded_is_one_line_and_loses_nothing(chat, tmp_path, capsys, content):
    file = tmp_path / "talk.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    say(chat, "hi")
    capsys.readouterr()
    say(chat, f"/load {file}")
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and len(roles(chat)) == 2
