"""What people see: answers and results on stdout, everything about them on stderr."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .chat_wrap import BETWEEN, packed

BAR = 28  # columns of the longest bar
ASCII = str.maketrans({"·": "-", "…": "..."})  # what a terminal without these shows instead
NAME = 24  # columns that the names of a table's rows need, or it is no table
NOTHING, INDENT = "-", "  "  # an empty cell, and what stands before the lines of a row
FEW = 3  # rounds; how long fewer took says little of a speed
LIKE = 0.7  # of a command or an option that may have been meant, see difflib
BESIDE = 32  # columns that its row and the frame take besides


def stderr() -> Console:
    """The console for progress, logs and summaries; plain text when it is not a terminal."""
    return _console(sys.stderr, stderr=True)


def stdout() -> Console:
    """The console for results; plain text when it is not a terminal."""
    return _console(sys.stdout)


def _console(stream: TextIO, **of: Any) -> Console:
    # Told, for FORCE_COLOR has rich take a pipe for a terminal and draw spinners into it.
    console = Told(highlight=False, force_terminal=stream.isatty(), **of)
    if console.is_dumb_terminal:  # rich takes any for one of 80 columns
        console.size = os.get_terminal_size(stream.fileno())
    return console


def error_line(message: str) -> None:
    """Say what is wrong and what to do: in one line, which a terminal has wrapped at words."""
    console, line = stderr(), " ".join(message.split())
    text = Text.assemble(("error: ", "bold red"), line)
    console.print(text, soft_wrap=not console.is_terminal)


def note(message: str) -> None:
    """A line about what is being done and why; a narrow terminal has it wrapped at words."""
    console = stderr()
    if console.options.ascii_only:
        message = message.translate(ASCII)
    console.print(Text(message, style="dim"), soft_wrap=not console.is_terminal)


@contextmanager
def waiting(message: str, quiet: bool = False) -> Iterator[None]:
    """Turn a spinner on a terminal's stderr meanwhile; `quiet` leaves the screen to others."""
    console = stderr()
    if quiet or not console.is_terminal:
        yield
    else:
        spinner = "line" if console.options.ascii_only else "dots"
        text = Text(f"{message} ...", no_wrap=True, overflow="ellipsis")
        with console.status(text, spinner=spinner):
            yield


def counted(number: int, thing: str) -> str:
    """How many of a thing, in the singular for one of it: "1 round", "82 rounds"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def print_json(content: dict[str, Any]) -> None:
    """The one JSON object of `--json`."""
    print(json.dumps(content, ensure_ascii=False), flush=True)


def speeds(rows: list[tuple[str, float, str]]) -> Table:
    """Bars of speeds, the fastest the longest.

    Args:
        rows: name, tokens per second, and a remark such as the speedup.
    """
    fastest = max((speed for _, speed, _ in rows), default=0.0)
    console = stderr()
    longest = min(BAR, max(4, console.width - BESIDE))
    dash = "=" if console.options.ascii_only else "━"
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(width=longest)
    table.add_column(justify="right", no_wrap=True)
    remarked = any(remark for _, _, remark in rows)
    if remarked:
        table.add_column(style="bold green", no_wrap=True)
    for name, speed, remark in rows:
        length = round(longest * speed / fastest) if fastest else 0
        bar = Text(dash * length, style="green" if remark else "blue")
        table.add_row(name, bar, f"{speed:,.0f} tok/s", *[remark] * remarked)
    return table


class Told(Console):
    """A console that leaves it to `app` how a command ends whose reader has left."""

    def on_broken_pipe(self) -> None:
        """Called while that error is handled; rich would end the program, as with an error."""
        raise


class Figures:
    """A table of short cells; where it is too wide, each row becomes lines that fit.

    Args:
        titles: of the columns; the first column names the rows.
        padding: columns between two of them.
        named: the first title says what the figures are, so it stands above such lines, too.
    """

    def __init__(self, *titles: str, padding: int = 2, named: bool = False) -> None:
        self._titles, self._padding, self._named = titles, padding, named
        self._rows: list[tuple[tuple[str, ...], Sequence[str], str]] = []

    def add(self, *cells: str, below: Sequence[str] = (), style: str = "") -> None:
        """Add a row, the lines to stand below it, and its style, one of rich's."""
        self._rows.append((cells, below, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = zip(self._titles, *(cells for cells, _, _ in self._rows), strict=True)
        longest, *others = (max(map(cell_len, column)) for column in columns)
        room = options.max_width - sum(others) - self._padding * len(others)
        widths = [min(longest, room), *others]
        narrow = widths[0] < min(longest, NAME)
        if not narrow:
            yield Text(self._line(self._titles, widths), "bold")
        elif self._named:
            yield Text(self._titles[0], "bold")
        for cells, below, style in self._rows:
            if narrow:
                yield from self._card(cells, style, options)
            elif cell_len(cells[0]) > widths[0]:  # a long name has a line of its own
                yield Text(f"{cells[0]}\n{self._line(('', *cells[1:]), widths)}", style)
            else:
                yield Text(self._line(cells, widths), style)
            for line in below:
                for part in _hung(line, options.max_width):
                    yield Text(part, "dim", overflow="fold")

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        (name, left), *others = zip(cells, widths, strict=True)
        padded = [name.ljust(left), *(cell.rjust(width) for cell, width in others)]
        return (" " * self._padding).join(padded)

    def _card(self, cells: Sequence[str], style: str, options: ConsoleOptions) -> Iterator[Text]:
        """A row without its table: every cell behind its title."""
        yield Text(cells[0], style or "bold", overflow="fold")
        told = zip(self._titles[1:], cells[1:], strict=True)
        parts = [f"{title} {cell}" for title, cell in told if cell not in ("", NOTHING)]
        between = BETWEEN.translate(ASCII) if options.ascii_only else BETWEEN
        for line in packed(parts, options.max_width - len(INDENT), between):
            yield Text(INDENT + line, style, overflow="fold")


def _hung(line: str, width: int) -> list[str]:
    """A line below a row, its further parts indented; names that are too long end at a slash."""
    room = width - 2 * len(INDENT)
    words = [word if len(word) <= room else word.replace("/", "/ ") for word in line.split()]
    return textwrap.wrap(
        " ".join(words),
        width,
        initial_indent=INDENT,
        subsequent_indent=2 * INDENT,
        break_on_hyphens=False,
    )


def sized(size: float) -> str:
    """Bytes for people, to one decimal."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def panel(title: str, body: RenderableType) -> Panel:
    """A frame no wider than what is in it, its title shortened to what fits."""
    if stderr().options.ascii_only:
        title = title.replace("·", "-")
    return Panel(body, title=Text(title), title_align="left", expand=False, border_style="dim")
