"""What people and programs see: results on stdout, everything about them on stderr, and files."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dflash_mlx.errors import OutputError
from dflash_mlx.validation import path_kind

BAR_WIDTH = 28
CLEAR_LINE = "\r\x1b[K"  # of a terminal
NOTHING = "-"  # an empty cell
MIN_STEPS = 3  # the speed of fewer steps says little
NOISE = 1.05  # of a measured speedup
DOUBTFUL = "?: a speedup above the tokens of a step: other programs disturbed the timing"


def stderr() -> Console:
    """The console for progress, logs and summaries; plain text when it is not a terminal."""
    return Console(stderr=True, highlight=False, force_terminal=sys.stderr.isatty())


def stdout() -> Console:
    """The console for results; plain text when it is not a terminal."""
    return Console(highlight=False, force_terminal=sys.stdout.isatty())


def error_line(message: str) -> None:
    """Print what is wrong and what to do, in one line that only a terminal wraps."""
    console = stderr()
    text = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    console.print(text, soft_wrap=not console.is_terminal)


def note(message: str) -> None:
    """Print a line about the work in progress, which only a terminal wraps."""
    console = stderr()
    console.print(Text(message, style="dim"), soft_wrap=not console.is_terminal)


@contextmanager
def waiting(message: str, spinner: bool = True) -> Iterator[None]:
    """Say on a terminal's stderr what is waited for, until it is there.

    A `spinner` would print each state of a progress bar as a line. Without one the line stands
    still, and a bar takes its place.
    """
    console, text = stderr(), Text(f"{message} ...", no_wrap=True, overflow="ellipsis")
    if not console.is_terminal or console.is_dumb_terminal:
        yield
    elif spinner:
        with console.status(text):
            yield
    else:
        console.print(text, end="\r")
        try:
            yield
        finally:
            console.file.write(CLEAR_LINE)


def counted(number: int, thing: str) -> str:
    """A number and its noun: "1 step", "82 steps"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def sized(size: float) -> str:
    """Bytes for people, to one decimal."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def rate(speed: float) -> str:
    """Tokens per second, with a decimal below 10; "-" where nothing could be measured."""
    return f"{speed:,.{1 if speed < 9.95 else 0}f}" if speed else NOTHING


def times(speedup: float, acceptance: float | None) -> str:
    """A speedup. A "?" marks one above the tokens of a step, which no step can bring."""
    mark = "?" * (acceptance is not None and speedup > NOISE * acceptance)
    return f"{speedup:.2f}x{mark}" if speedup >= 0.01 else "<0.01x"


def print_json(content: dict[str, Any]) -> None:
    """Print the one JSON object of `--json`."""
    print(as_text(content), flush=True)


def as_text(content: dict[str, Any]) -> str:
    """A JSON object in one line."""
    return json.dumps(content, ensure_ascii=False)


def make_table(*titles: str, padding: int = 2) -> Table:
    """A table without lines: names on the left, short figures on the right.

    Args:
        titles: of the columns.
        padding: spaces between two columns.
    """
    name, *figures = titles
    columns = [Column(name, overflow="fold"), *(Column(t, justify="right") for t in figures)]
    return Table(*columns, box=None, padding=(0, padding, 0, 0), pad_edge=False)


def speeds(rows: list[tuple[str, float, str]], estimated: str = "") -> Table:
    """Bars of speeds, the fastest the longest.

    Args:
        rows: name, tokens per second, and a remark such as the speedup.
        estimated: the name of a row whose speed is estimated, not measured: ~ marks it.
    """
    fastest = max((speed for _, speed, _ in rows), default=0.0)
    bars, figure = Column(min_width=4, max_width=BAR_WIDTH), Column(justify="right", no_wrap=True)
    remarks = Column(style="bold green", no_wrap=True)
    name = Column(no_wrap=True, overflow="fold")  # never shortened for an empty remark
    table = Table.grid(name, bars, figure, remarks, padding=(0, 1))
    for label, speed, remark in rows:
        bar = Bar(fastest or 1, 0, speed, color="green" if speed == fastest else "blue")
        mark = "~" * (label == estimated)
        table.add_row(label, bar, f"{mark}{rate(speed)} tok/s", remark)
    return table


def check_writable(path: Path) -> None:
    """Raise `OutputError` for a path that cannot be written to, before any work."""
    try:
        if path_kind(path) == "folder":
            raise OutputError(f"{path} is a folder: give --output a file.")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass  # permissions alone would not show a read-only disk
    except OSError as error:
        raise OutputError.because(path, error) from error


def write_result(path: Path | None, text: str) -> None:
    """Write a text to a file as `write_file`, or to stdout if it is None."""
    if path is not None:
        write_file(path, text)
    else:
        print(text, end="", flush=True)


def write_file(path: Path, text: str) -> None:
    """Write a whole file, or leave what was there. Raises `OutputError`.

    A device or a pipe, such as /dev/null or a shell's >(...), is written to and not replaced.
    """
    try:
        if path_kind(path) in ("folder", "other"):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise OutputError.because(path, error) from error


def _replace(path: Path, text: str) -> None:
    """Write a text beside a file, then put it in the file's place. Raises `OSError`."""
    partial = path.with_name(f".{path.name[:100]}.unfinished")
    try:
        with partial.open("w", encoding="utf-8") as file:
            if path.exists():
                partial.chmod(path.stat().st_mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # some disks report only now that they are full
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
