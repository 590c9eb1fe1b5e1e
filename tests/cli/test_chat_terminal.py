"""`dflash-mlx chat` with a person: typed, pasted, completed, interrupted."""

import re

import pytest
from terminal import PASTE, Terminal

SUM = "What is 47 plus 38?"
COUNT = "Count from 1 to 98 in steps of 1."
QUICK = ("--no-draft", "--stock-blas", "-n")

pytestmark = pytest.mark.slow


def test_turns_on_a_narrow_terminal(tmp_path):
    """Questions of one and several lines, an interrupted answer, /undo, and /retry."""
    terminal = Terminal(tmp_path, 40, "-n", "600", "--no-policy")
    terminal.type(SUM)
    terminal.type("/nope")
    terminal.type(COUNT)
    terminal.program.expect_exact("up to")
    terminal.program.sendintr()  # in the middle of the answer
    terminal.type("/undo")
    terminal.type("What is 6 plus 7?\\")  # in two lines
    terminal.program.expect_exact("...")
    terminal.program.send("\r")
    terminal.type('"""What is 30 plus 1?')
    terminal.program.expect_exact("...")
    terminal.program.send('"""\r')
    terminal.type("/retry")
    seen = terminal.leave()
    assert "So 47 + 38 = 85." in seen and "There is no /nope" in seen
    assert "stopped" in seen and "98 + 1" not in seen
    assert "The last question and its answer are removed." in seen
    assert "So 6 + 7 = 13." in seen and seen.count("So 30 + 1 = 31.") == 2
    counts = re.findall(r"prompt: (\d+) new, (\d+) cached", seen)
    new_tokens = [int(new) for new, _ in counts]
    cached_tokens = [int(cached) for _, cached in counts]
    assert len(counts) == 5 and cached_tokens[0] == 0
    assert new_tokens[4] == 1, "/retry reads its prompt again"
    assert max(new_tokens) < 40 and min(cached_tokens[1:]) > 90


def test_paste_completion_settings_editor_and_a_history_of_two_sessions(tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf " 6 plus 7?" >> "$1"\n')
    editor.chmod(0o755)
    talk = tmp_path / "talk.json"
    first = Terminal(tmp_path, 80, *QUICK, "40", "--system", "Be kind.", VISUAL=str(editor))
    first.type(PASTE.format("What is\n47\nplus\n38\n?"))
    first.type("/system")
    first.type("/sys\t Be brief.")  # completed
    first.type("/set temp\t 0.8")
    first.type("/set top_p 7")
    first.type("What is\x18\x05", enter=False)  # Ctrl-X Ctrl-E opens the editor, which sends
    first.type(f"/save {talk}")
    first.type("exit")
    first.program.expect("\n.*$")
    first.program.wait()
    seen = re.sub(r"\s+", " ", "\n".join(first.lines))
    assert "Be kind." in seen and "The system message is set." in seen
    assert "/set temperature 0.8 temperature 0.8" in seen and "error: top_p must be" in seen
    saved = talk.read_text()
    assert r"What is\n47\nplus\n38\n?" in saved and "What is 6 plus 7?" in saved
    assert "Be brief." in saved

    second = Terminal(tmp_path, 80, *QUICK, "8", "--resume", str(talk))
    up = "\x1b[A"
    second.type(3 * up)  # past "exit" and /save, to the message before them
    second.type("/load " + str(talk)[:-4] + "\t")
    seen = second.leave()
    assert "5 messages so far." in seen and "5 messages loaded." in seen
    assert ">>> What is 6 plus 7? " in seen and "8 tokens" in seen
