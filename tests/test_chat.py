"""`dflash-mlx chat` on a terminal, wide and narrow, and in a pipe."""

import json
import os
import re
from importlib.resources import files

import pexpect
import pyte
import pytest
import tinymodels
from program import HERE, PROGRAM, run

from dflash_mlx.cli import options
from dflash_mlx.cli.chat_commands import obey
from dflash_mlx.cli.chat_dialogue import Dialogue
from dflash_mlx.cli.chat_loop import Chat
from dflash_mlx.cli.chat_writer import BARS, DIM, NORMAL, Writer, ribbon
from dflash_mlx.cli.pair import Pair
from dflash_mlx.loop import generate
from dflash_mlx.machine.blas import BlasInfo

SIZE = ("COLUMNS", "LINES")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
SUM = "What is 47 plus 38?"

embedded = pytest.mark.skipif(
    not files("dflash_mlx").joinpath("tiny", "drafter", "model.safetensors").is_file(),
    reason="THE EMBEDDED PAIR IS MISSING: train it with scripts/train_tiny.sh",
)


class Terminal:
    """The program on a terminal, and what a person sees of it."""

    def __init__(self, columns: int, *arguments: str) -> None:
        self.screen = pyte.Screen(columns, 400)  # so high that nothing scrolls away
        self.stream = pyte.Stream(self.screen)
        # readline, once imported, has told every child of this process the size of its terminal.
        own = {name: value for name, value in os.environ.items() if name not in SIZE}
        options = {"dimensions": (30, columns), "encoding": "utf-8", "timeout": 120, "cwd": HERE}
        options |= {"env": own | {"TERM": "xterm-256color"}}
        self.program = pexpect.spawn(PROGRAM[0], [*PROGRAM[1:], "chat", *arguments], **options)
        self.program.logfile_read = self

    def write(self, text: str) -> None:
        """Called with all that the program shows."""
        self.stream.feed(text)

    def flush(self) -> None:
        """Called, too."""

    def type(self, text: str, after: str = ">>> ") -> None:
        """Enter a line once the program has shown `after`."""
        self.program.expect_exact(after)
        self.program.sendline(text)

    def leave(self) -> str:
        """Ctrl-D; all that was seen, its lines joined where the terminal broke them."""
        self.program.expect_exact(">>> ")
        self.program.sendeof()
        self.program.expect(pexpect.EOF)
        self.program.close()
        assert self.program.exitstatus == 0
        return " ".join("\n".join(self.screen.display).split())


@embedded
@pytest.mark.parametrize("columns", [80, 40])
def test_six_turns_on_a_terminal(columns):
    terminal = Terminal(columns, "-n", "600")
    terminal.type(SUM)  # 1
    terminal.type("/compare")
    terminal.type("/ribbon")
    terminal.type("What is 12 minus 5?")  # 2
    terminal.type("/nope")
    terminal.type("Count from 1 to 98 in steps of 1.")  # 3
    terminal.program.expect_exact("up to")
    terminal.program.sendintr()  # in the middle of the answer
    terminal.type("/undo")
    terminal.type("What is 6 plus 7?\\")  # 4, in two lines
    terminal.type("", after="... ")
    terminal.type('"""What is 30 plus 1?')  # 5
    terminal.type('"""', after="... ")
    terminal.type("/retry")  # 6
    terminal.type("/stats")
    seen = terminal.leave()
    assert "So 47 + 38 = 85." in seen and "So 12 - 5 = 7." in seen
    assert "x, the text is identical" in seen
    assert "There is no /nope" in seen
    assert "stopped" in seen and "98 + 1" not in seen
    assert "The last question and its answer are forgotten." in seen
    assert "So 6 + 7 = 13." in seen and seen.count("So 30 + 1 = 31.") == 2
    assert set(BARS) & set(seen) and "answers 6" in seen
    read = [tuple(map(int, turn)) for turn in re.findall(r"prompt: (\d+) new, (\d+) kept", seen)]
    assert len(read) == 6 and read[0][1] == 0 and read[5][0] == 1, "/retry reads no prompt again"
    assert all(new < 40 for new, _ in read) and all(kept > 90 for _, kept in read[1:])


@embedded
def test_the_same_in_a_pipe():
    lines = [SUM, "/compare", "What is 12 minus 5?", "/undo", "/retry", "/ribbon", "What is 6 + 7?"]
    lines += ["/clear", "", "What is 30 plus 1?", "/stats", "/quit", "never"]
    done = run("chat", stdin="\n".join(lines))
    assert done.returncode == 0 and not CONTROL.search(done.stdout + done.stderr)
    answers = [line for line in done.stdout.splitlines() if line.startswith("So ")]
    assert answers[0] == answers[2] == "So 47 + 38 = 85." and answers[1] == "So 12 - 5 = 7."
    assert len(answers) == 5 and answers[4] == "So 30 + 1 = 31."
    assert "the text is identical" in done.stderr and "new, 0 kept" in done.stderr
    assert "plain" not in done.stdout and "never" not in done.stdout


def test_a_pipe_has_the_librarys_own_text(pair):
    done = run("chat", "-n", "8", *pair, stdin="one\ntwo")
    messages = [{"role": "user", "content": "one"}]
    target = tinymodels.target()
    first = generate(target, None, messages, max_tokens=8).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    second = generate(target, None, messages, max_tokens=8).text
    assert done.stdout == f"{first}\n{second}\n"
    assert "8 tokens · " in done.stderr and "cut off by --max-tokens" in done.stderr


@pytest.fixture
def chat(monkeypatch) -> Chat:
    """A chat with a person, whose target answers eight tokens of nonsense."""
    pair = Pair(tinymodels.target(max_position_embeddings=128), None, None, BlasInfo("", None, ""))
    chat = Chat(Dialogue(pair, options.Sampling().settings() | {"max_tokens": 8}), obey)
    chat.interactive = True
    lines = iter(())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/quit"))
    return chat


def say(chat, *lines):
    """Lines of a person, and what they are told about each."""
    from dflash_mlx.cli.chat_commands import obey

    for line in lines:
        if not obey(chat, line):
            chat.take_turn(line)


def roles(chat):
    return [message["role"] for message in chat.dialogue.messages]


def test_undo_clear_and_system(chat, capsys):
    say(chat, "/undo", "/retry", "/compare", "/stats")
    told = capsys.readouterr().err
    assert told.count("\n") == 4 and "Nothing to undo" in told and "no question yet" in told
    say(chat, "/system be brief", "hi", "ho", "/undo")
    assert roles(chat) == ["system", "user", "assistant"]
    say(chat, "/clear")
    assert roles(chat) == ["system"]
    say(chat, "/system", "hi")
    assert roles(chat) == ["user", "assistant"]


def test_retry_takes_another_seed(chat):
    chat.dialogue.settings |= {"temperature": 1.0, "seed": 5}
    say(chat, "hi", "/retry")
    first, second = chat.dialogue.answers
    assert first.prompt == second.prompt and first.tokens != second.tokens
    assert chat.dialogue.settings["seed"] == 6 and roles(chat) == ["user", "assistant"]


def test_save_and_load(chat, tmp_path, capsys):
    file = tmp_path / "talk.json"
    say(chat, "hi", f"/save {file}", "ho", f"/load {file}")
    assert json.loads(file.read_text())["messages"] == chat.dialogue.messages
    assert roles(chat) == ["user", "assistant"] and "2 messages loaded" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file], "nothing half-written is left"


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


@pytest.mark.parametrize("name", ["", "/dev/null/no/talk.json", "no/such/folder/talk.json"])
def test_what_cannot_be_saved_is_one_line(chat, capsys, name):
    say(chat, f"/save {name}".strip())
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1


def test_a_turn_that_does_not_fit_is_forgotten(chat, capsys):
    say(chat, "hi")
    capsys.readouterr()
    say(chat, "x" * 500)
    assert capsys.readouterr().err.count("\n") == 1 and roles(chat) == ["user", "assistant"]
    say(chat, "ho")
    assert roles(chat) == 2 * ["user", "assistant"]


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_thinking_is_dimmed_wherever_the_text_is_cut(capsys, size):
    text = "a <think>b <c</think>d < e"
    writer = Writer(("<think>", "</think>"))
    for start in range(0, len(text), size):
        writer.write(text[start : start + size])
    writer.end()
    written = capsys.readouterr().out
    assert written.replace(NORMAL + DIM, "") == f"a {DIM}<think>b <c</think>{NORMAL}d < e\n"


def test_thinking_that_the_prompt_began_and_a_pipe_that_dims_nothing(capsys):
    for styled, expected in ((True, f"{DIM}hm{NORMAL}"), (False, "hm")):
        writer = Writer(("<think>", "</think>"), thinking=True, styled=styled)
        writer.write("hm</think>yes")
        writer.end()
        written = capsys.readouterr().out
        assert written.startswith(expected) and written.endswith("yes\n")
        assert (DIM in written) == styled


def test_a_ribbon():
    assert ribbon([0, 15, 7], 15) == "▁█▄"
    assert ribbon([0] * 100, 15) == "…" + "▁" * 72
    assert ribbon([0], 0) == "▁"
