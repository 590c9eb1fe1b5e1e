"""`dflash-mlx chat` in a pipe, its commands, and how an answer is written."""

import json
import re
import shutil
from importlib.resources import files
from itertools import islice
from unittest.mock import Mock

import pytest
import tinymodels
from program import run

from dflash_mlx.cli import chat_input
from dflash_mlx.cli.answer import DIM, NORMAL, Writer
from dflash_mlx.cli.chat_commands import run_command
from dflash_mlx.cli.chat_conversation import Chat, LocalModel
from dflash_mlx.cli.pair import Pair, published
from dflash_mlx.errors import WeightsError
from dflash_mlx.loop import generate, stream_generate
from dflash_mlx.machine.blas import BlasInfo
from dflash_mlx.settings import SETTINGS

DEFAULTS = {name: setting.default for name, setting in SETTINGS.items()}

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
SUM = "What is 47 plus 38?"


def test_each_line_of_a_pipe_is_a_question():
    """Even "exit", which ends a chat with a person."""
    lines = [SUM, "What is 12 minus 5?", "", "exit", "What is 30 plus 1?"]
    done = run("chat", stdin="\n".join(lines))
    assert done.returncode == 0 and not CONTROL.search(done.stdout + done.stderr)
    answers = [line for line in done.stdout.splitlines() if line.startswith("So ")]
    assert answers[0] == "So 47 + 38 = 85." and answers[1] == "So 12 - 5 = 7."
    assert answers[-1] == "So 30 + 1 = 31.", "the line 'exit' ended the chat"
    assert done.stderr.count("new, ") == 4 and "new, 0 cached" in done.stderr


def test_top_p_has_an_effect_at_the_publishers_temperature(tmp_path):
    """Without `-t` the model's published temperature is used, at which --top-p has an effect."""
    folder = shutil.copytree(files("dflash_mlx") / "tiny" / "target", tmp_path / "m")
    sampling = {"do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    command = ("chat", "-n", "2", "--top-p", "0.5", "-m", folder)
    assert "no effect" not in run(*command, stdin="Hi").stderr
    assert "--top-p has no effect" in run(*command, "-t", "0", stdin="Hi").stderr


def test_a_pipe_gets_the_answers_of_generate(pair):
    done = run("chat", "-n", "8", *pair, stdin="one\ntwo")
    messages = [{"role": "user", "content": "one"}]
    target = tinymodels.target()
    first = generate(target, None, messages, max_tokens=8).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    second = generate(target, None, messages, max_tokens=8).text
    assert done.stdout == f"{first}\n{second}\n"
    assert "8 tokens · " in done.stderr and "cut off by --max-tokens" in done.stderr


@pytest.fixture
def chat() -> Chat:
    """A chat with a person, whose model answers with eight tokens of nonsense."""
    pair = Pair(
        tinymodels.target(max_position_embeddings=128),
        drafter=None,
        block_size=None,
        blas=BlasInfo("", None, ""),
    )
    settings = DEFAULTS | {"max_tokens": 8}
    chat = Chat(LocalModel(pair), settings, [])
    chat.interactive = True
    return chat


def test_the_publishers_sampling_is_the_default(capsys):
    pair = Pair(tinymodels.target(), drafter=None, block_size=None, blas=BlasInfo("", None, ""))
    pair.target.sampling_defaults = {"temperature": 0.6, "top_p": 0.95}
    assert published(pair.target, {"temperature", "top_k"}) == {"top_p": 0.95}
    chat = Chat(LocalModel(pair), DEFAULTS | {"max_tokens": 4}, [])
    chat.change(published(pair.target, ()))
    assert chat.settings["temperature"] == 0.6 and chat.settings["seed"] is not None
    assert "Sampling as published: temperature 0.6, top_p 0.95." in capsys.readouterr().err


def say(chat, *lines):
    """Enter these lines: commands and questions."""
    for line in lines:
        if not run_command(chat, line):
            chat.ask(line)


def stderr_of(chat, capsys, *lines):
    """What is written to stderr when these lines are entered."""
    capsys.readouterr()
    say(chat, *lines)
    return capsys.readouterr().err


def roles(chat):
    return [message["role"] for message in chat.messages]


def test_undo_clear_and_retry(chat, capsys):
    assert "nothing to undo" in stderr_of(chat, capsys, "/undo")
    assert "no question yet" in stderr_of(chat, capsys, "/retry")
    say(chat, "/system be brief", "hi", "ho", "/undo")
    assert roles(chat) == ["system", "user", "assistant"]
    say(chat, "/retry")
    assert roles(chat) == ["system", "user", "assistant"]
    say(chat, "/clear")
    assert roles(chat) == ["system"]


def test_the_system_message_is_shown_set_and_removed(chat, capsys):
    assert "no system message" in stderr_of(chat, capsys, "/system")
    say(chat, "hi", "/system be\nbrief")
    assert chat.messages[0] == {"role": "system", "content": "be\nbrief"}
    assert stderr_of(chat, capsys, "/system") == "be\nbrief\n"
    say(chat, "/system none")
    assert roles(chat) == ["user", "assistant"]


@pytest.mark.parametrize("line", [" /undo", "/etc/hosts holds what?", "/* a comment */", " exit"])
def test_a_line_that_only_looks_like_a_command_is_sent(chat, line):
    say(chat, line)
    assert roles(chat) == ["user", "assistant"] and not chat.leaving


@pytest.mark.parametrize("line", ["exit", "quit ", "/quit", "/exit"])
def test_exit_and_quit_end_a_chat(chat, line):
    say(chat, line)
    assert chat.leaving and not chat.messages


def test_settings_are_shown_and_changed(chat, capsys):
    assert "temperature        0.0" in stderr_of(chat, capsys, "/set")
    assert stderr_of(chat, capsys, "/set temp 0.8") == "temperature        0.8\n"
    assert stderr_of(chat, capsys, "/set max-tokens 5") == "max_tokens         5\n"
    say(chat, "/set seed 3", "/set seed none")
    assert chat.settings["seed"] not in (3, None), "a new seed is drawn"
    say(chat, "/set top_p=0.9", "/set top_k 5", "/set seed 3", "/set max_tokens 2")
    assert "2 tokens" in stderr_of(chat, capsys, "hi")
    assert (chat.settings["top_p"], chat.settings["top_k"], chat.settings["seed"]) == (0.9, 5, 3)


@pytest.mark.parametrize(
    "wrong",
    ["temperature hot", "temperature -1", "temperature nan", "top_p 7", "top_k 1.5"]
    + ["top_k 99999", "seed -1", "max_tokens -1", "temprature 1", "temprature"],
)
def test_a_bad_setting_is_one_line_and_changes_nothing(chat, capsys, wrong):
    before = dict(chat.settings)
    stderr = stderr_of(chat, capsys, f"/set {wrong}")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert chat.settings == before


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/cleer", "Did you mean /clear?"),
        ("/xyzzy", "/help lists"),
        ("/reset", "The conversation is cleared"),
        ("/set temprature 1", "Did you mean temperature?"),
        ("/set temperature 7", "0.2 to 1 is usual"),
        ("/set top_p 0.5", "top_p has no effect at temperature 0"),
        ("hi", "Stopped before the answer"),
    ],
)
def test_a_hint_follows_a_line_that_does_not_do_what_was_meant(
    chat, capsys, monkeypatch, line, hint
):
    """An answer is interrupted by Ctrl-C here."""
    monkeypatch.setattr("dflash_mlx.stream_generate", Mock(side_effect=KeyboardInterrupt))
    assert hint in stderr_of(chat, capsys, line) and not chat.messages


def test_retry_samples_with_another_seed(chat):
    say(chat, "/set temperature 1", "/set seed 5", "hi")
    first = chat.messages[-1]["content"]
    say(chat, "/retry")
    assert chat.settings["seed"] == 6 and chat.messages[-1]["content"] != first


def test_save_and_load(chat, tmp_path, capsys):
    file = tmp_path / "talk.json"
    say(chat, "hi", f"/save {file}", "ho", f"/load {file}")
    assert json.loads(file.read_text())["messages"] == chat.messages
    assert roles(chat) == ["user", "assistant"] and "2 messages loaded" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file], "nothing half-written is left"
    say(chat, "ho", f"/save {file}")
    assert json.loads(file.read_text())["messages"] == chat.messages


@pytest.mark.parametrize("name", ["a" * 300, "~no-such-user/talk.json"])
def test_an_impossible_file_name_does_not_end_the_conversation(name, chat, capsys):
    assert "cannot be written" in stderr_of(chat, capsys, "hi", f"/save {name}")
    assert "cannot be read" in stderr_of(chat, capsys, f"/load {name}")
    assert roles(chat) == ["user", "assistant"]


def test_a_file_of_another_kind_is_not_replaced(chat, tmp_path, capsys):
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    assert str(notes) in stderr_of(chat, capsys, "hi", f"/save {notes}")
    assert notes.read_text() == "precious"
    say(chat, f"/save {tmp_path / 'talk.json'}", "/clear", "ho")
    assert "another conversation" in stderr_of(chat, capsys, f"/save {tmp_path / 'talk.json'}")


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"messages": [{"role": "cook", "content": "x"}]}', "\xff"]
)
def test_a_conversation_is_kept_when_another_cannot_be_loaded(chat, tmp_path, capsys, content):
    file = tmp_path / "talk.json"
    if content is not None:
        file.write_text(content, encoding="latin-1")
    say(chat, "hi")
    stderr = stderr_of(chat, capsys, f"/load {file}")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert len(roles(chat)) == 2


def test_the_conversation_is_kept_when_it_gets_too_long(chat, capsys):
    say(chat, "hi")
    before = [*chat.messages]
    stderr = stderr_of(chat, capsys, "be nice " * 40)
    assert "/clear starts a new conversation." in stderr and stderr.count("error: ") == 1
    assert chat.messages == before
    say(chat, "ho")
    assert len(chat.messages) == 4


def test_an_answer_that_fails_midway_does_not_change_the_conversation(chat, capsys, monkeypatch):
    say(chat, "hi", "ho")
    before = chat.messages

    def fails(*arguments, **settings):
        yield from islice(stream_generate(*arguments, **settings), 2)
        raise WeightsError("The disk is gone.")

    monkeypatch.setattr("dflash_mlx.stream_generate", fails)
    for line in ("/retry", "hm"):
        assert "error: The disk is gone.\n" in stderr_of(chat, capsys, line)
        assert chat.messages == before


def test_think_warns_at_once_that_the_template_has_no_switch(chat):
    with pytest.warns(UserWarning, match="no such switch"):
        say(chat, "/think on")


def test_the_line_about_an_answer(capsys):
    pair = Pair(
        tinymodels.target(),
        drafter=tinymodels.random_drafter(),
        block_size=None,
        blas=BlasInfo("", None, ""),
    )
    settings = DEFAULTS | {"max_tokens": 8}
    stderr = stderr_of(Chat(LocalModel(pair), settings, []), capsys, "hi")
    assert re.search(r"8 tokens · [\d,.]+ tok/s · \d\.\d tokens per step · cut off by", stderr)
    assert "plain" not in stderr, "no costs were measured"


def test_only_its_owner_can_read_the_history_of_a_chat(tmp_path, monkeypatch, capsys):
    """Without a folder to keep it in, a note says so once."""
    monkeypatch.setattr(chat_input, "cache_folder", lambda part: tmp_path / part)
    chat_input._open_history().append_string("one\nmore")
    assert [*chat_input._open_history().load_history_strings()] == ["one\nmore"]
    assert (tmp_path / "chat" / "history").stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    monkeypatch.setattr(chat_input, "cache_folder", lambda part: tmp_path / "file")
    chat_input._open_history().append_string("two")
    assert capsys.readouterr().err.startswith("The history of this chat is not kept")


@pytest.mark.parametrize(
    ("typed", "unfinished", "message"),
    [
        ("one", False, "one"),
        ("one\\", True, None),
        ("one\\\ntwo", False, "one\ntwo"),
        ('"""', True, None),
        ('"""one\n\\', True, None),
        ('"""one\ntwo"""', False, "one\ntwo"),
    ],
)
def test_a_backslash_or_quotes_continue_a_message_on_the_next_line(typed, unfinished, message):
    assert chat_input.is_unfinished(typed) == unfinished
    assert message is None or chat_input.joined(typed) == message


def test_reasoning_is_dimmed_and_control_characters_are_replaced(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    writer = Writer()
    writer.write([("hm", True), ("a\r\nb\x1b[2Jx\x07", False)])
    writer.end()
    assert capsys.readouterr().out == f"{DIM}hm{NORMAL}\na\nb\ufffd[2Jx\ufffd\n"
