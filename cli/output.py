"""Output for people and programs: results on stdout, everything else on stderr, and files."""

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
CLEAR_LINE = "\r\x1b[K"  # clears a terminal's line
NOTHING = "-"  # shown in an empty cell
MIN_STEPS = 3  # the speed of fewer steps says little
NOISE = 1.05  # how far a measured speedup may exceed its limit by chance
DOUBTFUL = "?: a speedup above the tokens of a step: other programs disturbed the timing"


def stderr() -> Console:
    """Return the console for progress, logs and summaries; plain text if it is not a terminal."""
    return Console(stderr=True, highlight=False, force_terminal=sys.stderr.isatty())


def stdout() -> Console:
    """Return the console for results; plain text if it is not a terminal."""
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
    """Show on a terminal what the program is doing, until the context ends.

    Use `spinner=False` around work that draws a progress bar. A spinner would print every state of
    the bar as a new line. Without one, the bar overwrites the message.
    """
    console = stderr()
    text = Text(f"{message} ...", no_wrap=True, overflow="ellipsis")
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
    """Return a number with its noun: "1 step", "82 steps"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def sized(size: float) -> str:
    """Return bytes in MB or GB, with one decimal."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def rate(speed: float) -> str:
    """Return tokens per second, with a decimal below 10; "-" if nothing could be measured."""
    if not speed:
        return NOTHING
    return f"{speed:.1f}" if speed < 9.95 else f"{speed:,.0f}"


def times(speedup: float, acceptance: float | None) -> str:
    """Return a speedup, with a "?" if it exceeds the tokens per step, its upper limit."""
    if speedup < 0.01:
        return "<0.01x"
    is_doubtful = acceptance is not None and speedup > NOISE * acceptance
    return f"{speedup:.2f}x{'?' if is_doubtful else ''}"


def print_json(content: dict[str, Any]) -> None:
    """Print the one JSON object of `--json`."""
    print(as_text(content), flush=True)


def as_text(content: dict[str, Any]) -> str:
    """Return a JSON object in one line."""
    return json.dumps(content, ensure_ascii=False)


def make_table(*titles: str, padding: int = 2) -> Table:
    """Make a table without lines: names on the left, short figures on the right.

    Args:
        titles: the titles of the columns.
        padding: spaces between two columns.
    """
    columns = [Column(titles[0], overflow="fold")]
    columns += [Column(title, justify="right") for title in titles[1:]]
    return Table(*columns, box=None, padding=(0, padding, 0, 0), pad_edge=False)


def speeds(rows: list[tuple[str, float, str]], estimated_row: str = "") -> Table:
    """Make a table with bars of speeds. The fastest speed has the longest bar.

    Args:
        rows: name, tokens per second, and a remark such as the speedup.
        estimated_row: the name of a row whose speed is estimated, not measured. A ~ marks it.
    """
    fastest = max((speed for _, speed, _ in rows), default=0.0)
    table = Table.grid(
        Column(no_wrap=True, overflow="fold"),  # names, never shortened for an empty remark
        Column(min_width=4, max_width=BAR_WIDTH),
        Column(justify="right", no_wrap=True),
        Column(style="bold green", no_wrap=True),
        padding=(0, 1),
    )
    for name, speed, remark in rows:
        color = "green" if speed == fastest else "blue"
        bar = Bar(fastest or 1, 0, speed, color=color)
        mark = "~" if name == estimated_row else ""
        table.add_row(name, bar, f"{mark}{rate(speed)} tok/s", remark)
    return table


def check_writable(path: Path) -> None:
    """Raise `OutputError` for a path that cannot be written to, before any work."""
    try:
        if path_kind(path) == "folder":
            raise OutputError(f"{path} is a folder: give --output a file.")
        # Try it, because permissions do not tell whether a disk is read-only.
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise OutputError.because(path, error) from error


def write_result(path: Path | None, text: str) -> None:
    """Write a text to a file like `write_file`, or to stdout if `path` is None."""
    if path is not None:
        write_file(path, text)
    else:
        print(text, end="", flush=True)


def write_file(path: Path, text: str) -> None:
    """Write a whole file. If that fails, an existing file stays as it was. Raises `OutputError`.

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
    """Write a text to a temporary file in the same folder, then rename it. Raises `OSError`."""
    partial = path.with_name(f".{path.name[:100]}.unfinished")
    try:
        with partial.open("w", encoding="utf-8") as file:
            if path.exists():
                partial.chmod(path.stat().st_mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # some disks report only here that they are full
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
