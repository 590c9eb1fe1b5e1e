"""What a person may type wrongly in a chat without losing anything."""

import os
from types import SimpleNamespace

import pytest
import tinymodels
from test_chat import say, told

from dflash_mlx.cli import options
from dflash_mlx.cli.chat_commands import obey, reader
from dflash_mlx.cli.chat_dialogue import Dialogue
from dflash_mlx.cli.chat_line import Line
from dflash_mlx.cli.chat_loop import Chat
from dflash_mlx.cli.pair import Pair
from dflash_mlx.machine.blas import BlasInfo


@pytest.fixture
def chat() -> Chat:
    pair = Pair(tinymodels.target(), None, None, BlasInfo("", None, ""))
    return Chat(Dialogue(pair, options.Sampling().settings() | {"max_tokens": 8}), obey, reader)


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


def typing(*texts):
    """A line of somebody who types these, and then Ctrl-D."""
    line, typed = Line.__new__(Line), iter(texts)

    def prompt(*_, **__):
        for text in typed:
            return text
        raise EOFError

    line._session = SimpleNamespace(prompt=prompt)
    return line


@pytest.mark.parametrize("texts", [['"""a', "b"], ["a\\"], ["a\\", "b\\"]])
def test_ctrl_d_in_a_message_gives_up_that_and_not_the_chat(texts):
    line = typing(*texts)
    with pytest.raises(KeyboardInterrupt):
        line.read()
    with pytest.raises(EOFError):
        line.read()
