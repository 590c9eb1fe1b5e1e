"""What a person sees of a download and of an answer, on a terminal."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pexpect
import pyte
import pytest
from hubserver import HubServer
from terminal import PASTE, Terminal

import dflash_mlx
from dflash_mlx.cli.answer import Writer

TARGET = "mlx-community/Qwen3-4B-4bit"
DRAFTER = "z-lab/Qwen3-4B-DFlash-b16"


@pytest.fixture
def hub():
    """A hub with the embedded pair under the names of a large one."""
    server = HubServer()
    tiny = Path(dflash_mlx.__file__).parent / "tiny"
    server.repositories = {TARGET: tiny / "target", DRAFTER: tiny / "drafter"}
    with server.running():
        yield server


def opened(home, hub, command, *arguments):
    where = {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    return Terminal(home, 80, *arguments, command=command, **where)


@pytest.mark.slow
def test_a_download_has_one_bar_ends_at_once_and_is_asked_for_once(hub, tmp_path):
    hub.hold.clear()
    first = opened(tmp_path, hub, "pull", TARGET)
    first.program.expect_exact(" of 5.77M")
    first.program.sendintr()  # the server sends nothing more
    first.program.expect_exact("What came is kept")
    first.program.expect(pexpect.EOF)
    first.program.close()
    assert first.program.exitstatus == 130

    hub.hold.set()
    again = opened(tmp_path, hub, "pull", TARGET)
    again.program.expect(pexpect.EOF)
    again.program.close()
    assert again.program.exitstatus == 0, again.shown
    assert all(word not in again.shown for word in ("Fetching", "Reconstruction", "complete:"))

    hub.requests.clear()
    answer = opened(tmp_path, hub, "generate", "--model", TARGET, "What is 47 plus 38?")
    answer.program.expect(pexpect.EOF)
    assert not hub.requests and "Fetching" not in answer.shown
    assert "Let us add 47 and 38" in answer.lines[0], answer.lines[:5]


TEXT = "I was trained on a small synthetic corpus, so I can do simple arithmetic. " * 4
TEXT += f"\n    code = {'x' * 150} # so long\n" + "字" * 100


@pytest.mark.parametrize("columns", [[60], [80], [120], [80, 60], [60, 120]])
@pytest.mark.parametrize("size", [1, 7])
def test_answers_wrap_at_words(columns, size, monkeypatch):
    """Also when the window is resized in the middle of an answer, and words come in pieces."""
    leader, follower = pty.openpty()
    screen = pyte.Screen(columns[0], 200)
    screen.set_mode(pyte.modes.LNM)
    stream = pyte.Stream(screen)
    output = io.StringIO()
    monkeypatch.setattr(output, "isatty", lambda: True)
    monkeypatch.setattr(output, "fileno", lambda: follower)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        writer = Writer()
        parts = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
        for index, part in enumerate(parts):
            now = columns[index * len(columns) // len(parts)]
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, now, 0, 0))
            writer.write([(part, False)])
    stream.feed(output.getvalue())
    os.close(leader)
    os.close(follower)
    if len(columns) == 1:
        lines = [line.rstrip() for line in screen.display]
        words = " ".join(lines).split()
        assert max(map(len, lines)) < columns[0]
        assert [word for word in TEXT.split() if len(word) < 60 and word not in words] == []
        assert sum(line.count("x") for line in lines if "x" * 20 in line) == 150


@pytest.mark.slow
def test_what_is_typed_while_a_chat_loads_is_neither_shown_nor_asked(hub, tmp_path):
    hub.hold.clear()  # the download stands still
    chat = opened(tmp_path, hub, "chat", "--model", TARGET)
    chat.program.expect_exact(" of 5.77M")
    chat.program.send("What is 6 plus 7?\r")
    chat.program.send(PASTE.format("What is 30 plus 1?\nAnd more?"))
    chat.program.send("half a line")
    hub.hold.set()
    chat.type("How many minutes are in 3 hours?")
    seen = chat.leave()
    assert "3 hours = 180 minutes" in seen and seen.count("tokens per step") == 1
    assert not [typed for typed in ("6 plus 7", "30 plus 1", "half a line") if typed in seen]


@pytest.mark.slow
def test_a_chat_that_is_ended_while_it_loads_leaves_the_terminal_as_it_was(hub, tmp_path):
    hub.hold.clear()
    chat = opened(tmp_path, hub, "chat", "--model", TARGET)
    chat.program.expect_exact(" of 5.77M")
    while_loading = termios.tcgetattr(chat.program.child_fd)[3]
    chat.program.sendintr()
    chat.program.expect(pexpect.EOF)
    after = termios.tcgetattr(chat.program.child_fd)[3]
    assert not while_loading & termios.ECHO and after & termios.ECHO and after & termios.ICANON


@pytest.mark.slow
def test_the_first_answer_has_words_that_anybody_reads(tmp_path):
    """What `make demo` shows on 80 columns: the toy is called one the first time only."""
    question = "How many minutes are in 3 hours?"
    screens = []
    for _ in range(2):
        terminal = Terminal(tmp_path, 80, question, "--compare", command="generate")
        terminal.program.expect(pexpect.EOF)
        screens.append([line for line in terminal.lines if line])
    first, second = ("\n".join(lines) for lines in screens)
    assert screens[0][0] == "Each of the 3 hours has 60 minutes." and " = 0" not in first
    assert re.search(r"plain +\S+ +[\d,.]+ tok/s", first)
    assert re.search(r"drafted +\S+ +[\d,.]+ tok/s +[\d.]+x", first)
    told = r"│ 50 tokens: \d\.\d tokens per step in \d+ steps, drafted by DFlash and lookup +│"
    assert re.search(told, first), screens[0]
    assert "identical to plain decoding: yes" in first
    assert "tiny is a toy" in first and "toy" not in second
