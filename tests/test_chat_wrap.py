"""Answers on a terminal: broken between words however they come, also when the window narrows."""

import re

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.cli.chat_wrap import Wrapped, packed
from dflash_mlx.cli.chat_writer import Writer
from dflash_mlx.cli.output import counted

ROWS = 60
# Of at most 12 letters, so that each fits into the narrowest line below.
words = st.text("abcxyzäß.,€é", min_size=1, max_size=12)
gaps = st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n", "\t"])
texts = st.lists(st.tuples(words, gaps), min_size=1, max_size=60).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)


class Window:
    """A terminal without a program; one that narrows cuts off what is right of its edge."""

    def __init__(self, columns: int) -> None:
        self.screen = pyte.HistoryScreen(columns, ROWS, history=1000)
        self.screen.set_mode(pyte.modes.LNM)  # as the line discipline does
        self.stream = pyte.Stream(self.screen)

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines

    def narrow(self, columns: int) -> None:
        self.screen.resize(ROWS, columns)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]


def write(window: Window, pieces: list[str], narrow: tuple[int, int] | None = None) -> None:
    """Pieces as a model's rounds bring them; before one of them the window narrows."""
    wrapped = Wrapped(window.size, window.stream.feed)
    for number, piece in enumerate(pieces):
        if narrow and number == narrow[0]:
            window.narrow(narrow[1])
        wrapped.fit()
        wrapped.put(piece, False)
    wrapped.fit()
    wrapped.put("\n", False)


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


WIDE, NARROW = st.integers(60, 200), st.integers(13, 40)
PROSE = st.lists(words, min_size=40, max_size=60).map(" ".join)


def check_no_word_is_torn(text: str, size: int, before: int, share: int, after: int) -> None:
    window = Window(before)
    pieces = cut(text, size)
    write(window, pieces, (len(pieces) * share // 10, after))
    seen = " ".join(window.lines).split()
    expected = text.split()
    assert seen and seen == expected[-len(seen) :], "the end of the text, word by word"
    if text.count("\n") + len(text) // 13 < ROWS // 2:
        assert seen == expected


@given(PROSE, st.integers(1, 9), WIDE, st.integers(2, 9), NARROW)
def test_no_word_is_torn_when_the_window_narrows(text, size, before, share, after):
    check_no_word_is_torn(text, size, before, share, after)


@given(texts, st.integers(1, 9), NARROW, st.integers(0, 9), WIDE)
def test_no_word_is_torn_when_the_window_widens(text, size, before, share, after):
    check_no_word_is_torn(text, size, before, share, after)


@given(texts, st.integers(1, 9), st.integers(13, 200))
def test_lines_are_full_and_breaks_of_the_text_stay(text, size, columns):
    """The same as a simple greedy filling of each of the text's own lines."""
    text = text.replace("\t", " ").rstrip()
    written: list[str] = []
    wrapped = Wrapped(lambda: (columns, ROWS), written.append)
    for piece in cut(text, size):
        wrapped.put(piece, False)
    wrapped.flush()
    expected = []
    for line in text.split("\n"):
        expected.append("")
        for gap, word in re.findall(r"( *)([^ ]+)", line):
            if expected[-1] and len(expected[-1]) + len(gap) + len(word) > columns:
                expected.append(word)
            else:
                expected[-1] += gap + word
    assert "".join(written) == "\n".join(expected)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("see " + "x" * 25 + " there", ["see", "x" * 10, "x" * 10, "xxxxx", "there"]),
        ("    deep code", ["    deep", "code"]),
        ("人工智能很有用吗。是", ["人工智能很", "有用吗。是"]),
        ("one\r\ntwo\x1b[2Jx\x07", ["one", "two\ufffd[2Jx\ufffd"]),
    ],
)
def test_long_words_code_chinese_and_control_characters(text, lines):
    written: list[str] = []
    wrapped = Wrapped(lambda: (10, ROWS), written.append)
    wrapped.put(text, False)
    wrapped.flush()
    assert "".join(written) == "\n".join(lines)


def test_a_terminal_that_does_not_know_its_width_has_the_usual_one():
    written: list[str] = []
    wrapped = Wrapped(lambda: (0, 0), written.append)
    wrapped.put("word " * 40 + "\n", False)
    assert max(map(len, "".join(written).split("\n"))) == 79


def test_thinking_is_dimmed_in_lines_too(capsys):
    writer = Writer(("<think>", "</think>"), size=lambda: (12, ROWS))
    for piece in ("<thi", "nk>hm hm hm", " hm</th", "ink>yes it is"):
        writer.write(piece)
    writer.end()
    written = capsys.readouterr().out
    screen = pyte.Screen(12, ROWS)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(written)
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines == ["<think>hm hm", "hm", "hm</think>", "yes it is"]
    assert "\x1b[2mhm\x1b[0m" in written and "yes it is" in written


def test_a_status_line_in_lines_that_fit():
    parts = ["77 tokens", "292 tok/s", "~1.8x plain", "prompt: 18 new, 0 kept"]
    assert packed(parts, 80) == [" · ".join(parts)]
    assert packed(parts, 40) == [" · ".join(parts[:3]), parts[3]]
    assert packed(parts, 5) == parts


def test_one_of_a_thing():
    assert counted(1, "round") == "1 round" and counted(0, "round") == "0 rounds"
    assert counted(1200, "token") == "1,200 tokens"
