"""Tables on any terminal: every figure is there, no line is too long, no word is cut."""

import io
import os
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dflash_mlx.cli.screen import Figures, stderr, stdout

CELL = st.text("abcdefgh0123456789.,x/-", min_size=1, max_size=12)


@st.composite
def tables(draw):
    titles = draw(st.lists(CELL, min_size=2, max_size=9))
    cells = st.lists(CELL, min_size=len(titles), max_size=len(titles))
    return titles, draw(st.lists(cells, min_size=1, max_size=5))


def shown(titles, rows, width, encoding="utf-8", below=(), **options):
    table = Figures(*titles, **options)
    for row in rows:
        table.add(*row, below=below)
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    Console(file=file, width=width).print(table)
    file.seek(0)
    return file.read().splitlines()


@given(tables(), st.integers(40, 200), st.sampled_from(["utf-8", "ascii"]))
def test_nothing_is_lost_and_nothing_is_too_long(table, width, encoding):
    titles, rows = table
    lines = shown(titles, rows, width, encoding)
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines).split()
    for row in rows:
        assert all(cell in words for cell in row if cell != "-")
    assert encoding == "utf-8" or not any("?" in line for line in lines)


def test_a_table_where_there_is_room_and_lines_where_there_is_not():
    titles, rows = ("model", "size", "fits"), [("a/model", "8.0 GB", "yes")]
    wide = shown(titles, rows, 40, below=["drafted by another"])
    assert wide == ["model      size  fits", "a/model  8.0 GB   yes", "  drafted by another"]
    assert shown(titles, rows, 20) == ["a/model", "  size 8.0 GB", "  fits yes"]
    named = shown(("ms, by rows", "1", "16"), [("after a text", "2", "3")], 12, named=True)
    assert named == ["ms, by rows", "after a text", "  1 2 · 16 3"]


def test_a_terminal_that_moves_no_cursor_has_its_own_width(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    leader, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    with open(leader, "rb", 0), open(terminal, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        assert stderr().is_dumb_terminal and stderr().width == 40


def test_a_table_whose_reader_leaves_ends_as_all_output_does(monkeypatch):
    """With the exit code of a closed pipe, which is not rich's."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", closefd=False) as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with pytest.raises(BrokenPipeError):
            stdout().print("x" * 100_000)


def test_what_stands_below_is_indented_and_no_name_is_torn():
    below = ["drafted by RedHatAI/Qwen3.6-35B-A3B-speculator.dspark"]
    lines = shown(("model", "size"), [("a/model", "8.0 GB")], 40, below=below)
    assert lines[2:] == ["  drafted by RedHatAI/", "    Qwen3.6-35B-A3B-speculator.dspark"]
    assert shown(("model", "size"), [("a/model", "8.0 GB")], 80, below=below)[2] == f"  {below[0]}"


def test_one_long_name_does_not_take_the_table_away():
    titles, rows = ("name", "size"), [("x" * 50, "1"), ("y" * 10, "2")]
    lines = shown(titles, rows, 40)
    assert lines[0].split() == ["name", "size"] and len(lines[0]) == 40
    assert lines[1].rstrip() == "x" * 40 and lines[-1] == "y" * 10 + " " * 29 + "2"
