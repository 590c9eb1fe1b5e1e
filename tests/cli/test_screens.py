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


def start_command(home, hub, command, *arguments):
    """Start a command in a terminal, which downloads from the test's hub."""
    environment = {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    return Terminal(home, 80, *arguments, command=command, **environment)


@pytest.mark.slow
def test_a_download_can_be_interrupted_continued_and_then_used_without_the_hub(hub, tmp_path):
    hub.hold.clear()  # the download stands still
    interrupted = start_command(tmp_path, hub, "pull", TARGET)
    interrupted.program.expect_exact(" of 5.77M")
    interrupted.program.sendintr()
    interrupted.program.expect_exact("run this again to continue")
    interrupted.program.expect(pexpect.EOF)
    interrupted.program.close()
    assert interrupted.program.exitstatus == 130

    hub.hold.set()
    again = start_command(tmp_path, hub, "pull", TARGET)
    again.program.expect(pexpect.EOF)
    again.program.close()
    assert again.program.exitstatus == 0, again.shown
    # The progress bars of the hub's client are not shown in addition to ours.
    assert all(word not in again.shown for word in ("Fetching", "Reconstruction", "complete:"))

    hub.requests.clear()
    answer = start_command(tmp_path, hub, "generate", "--model", TARGET, "What is 47 plus 38?")
    answer.program.expect(pexpect.EOF)
    assert not hub.requests and "Fetching" not in answer.shown
    assert "Let us add 47 and 38" in answer.lines[0], answer.lines[:5]


TEXT = "I was trained on a small synthetic corpus, so I can do simple arithmetic. " * 4
TEXT += f"\n    code = {'x' * 150} # so long\n" + "字" * 100


@pytest.mark.parametrize("columns", [[60], [80], [120], [80, 60], [60, 120]])
@pytest.mark.parametrize("size", [1, 7])
def test_answers_wrap_at_words(columns, size, monkeypatch):
    """No word or character is lost, whatever pieces an answer comes in.

    With two widths, the window is resized in the middle of the answer: nothing must fail then, but
    the result depends on the terminal.
    """
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
            width = columns[index * len(columns) // len(parts)]
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
            writer.write([(part, False)])
    stream.feed(output.getvalue())
    os.close(leader)
    os.close(follower)
    if len(columns) == 1:
        lines = [line.rstrip() for line in screen.display]
        words = " ".join(lines).split()
        assert max(map(len, lines)) < columns[0]
        words_shorter_than_a_line = {word for word in TEXT.split() if len(word) < 60}
        assert words_shorter_than_a_line <= set(words)
        assert sum(line.count("x") for line in lines if "x" * 20 in line) == 150


@pytest.mark.slow
def test_input_while_a_chat_loads_is_neither_shown_nor_sent(hub, tmp_path):
    hub.hold.clear()  # the download stands still
    chat = start_command(tmp_path, hub, "chat", "--model", TARGET)
    chat.program.expect_exact(" of 5.77M")
    chat.program.send("What is 6 plus 7?\r")
    chat.program.send(PASTE.format("What is 30 plus 1?\nAnd more?"))
    chat.program.send("half a line")
    hub.hold.set()
    chat.type("How many minutes are in 3 hours?")
    seen = chat.leave()
    assert "3 hours = 180 minutes" in seen and seen.count("tokens per step") == 1
    assert all(typed not in seen for typed in ("6 plus 7", "30 plus 1", "half a line"))


@pytest.mark.slow
def test_ctrl_c_while_a_chat_loads_restores_the_terminal(hub, tmp_path):
    """Characters are not echoed while it loads."""
    hub.hold.clear()  # the download stands still
    chat = start_command(tmp_path, hub, "chat", "--model", TARGET)
    chat.program.expect_exact(" of 5.77M")
    while_loading = termios.tcgetattr(chat.program.child_fd)[3]
    chat.program.sendintr()
    chat.program.expect(pexpect.EOF)
    after = termios.tcgetattr(chat.program.child_fd)[3]
    assert not while_loading & termios.ECHO and after & termios.ECHO and after & termios.ICANON


@pytest.mark.slow
def test_the_screen_of_make_demo(tmp_path):
    """On 80 columns. A note says that the model is a toy, the first time only."""
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
    summary = r"│ 50 tokens: \d\.\d tokens per step in \d+ steps, drafted by DFlash and lookup +│"
    assert re.search(summary, first), screens[0]
    assert "identical to plain decoding: yes" in first
    assert "tiny is a toy" in first and "toy" not in second
