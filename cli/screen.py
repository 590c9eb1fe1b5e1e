"""What people see: answers and results on stdout, everything about them on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BAR = 28  # columns of the longest bar
ASCII = str.maketrans({"·": "-", "…": "..."})  # what a terminal without these shows instead
BESIDE = 32  # columns that its row and the frame take besides


def stderr() -> Console:
    """The console for progress, logs and summaries; plain text when it is not a terminal."""
    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """The console for results; plain text when it is not a terminal."""
    return Console(highlight=False)


def error_line(message: str) -> None:
    """Say in one line what is wrong and what to do, whatever the width of the terminal."""
    line = " ".join(message.split())
    stderr().print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)


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
    table.add_column(justify="right")
    table.add_column(style="bold green")
    for name, speed, remark in rows:
        length = round(longest * speed / fastest) if fastest else 0
        bar = Text(dash * length, style="green" if remark else "blue")
        table.add_row(name, bar, f"{speed:,.0f} tok/s", remark)
    return table


def sized(size: float) -> str:
    """Bytes for people, to one decimal."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def panel(title: str, body: RenderableType) -> Panel:
    """A frame no wider than what is in it, its title shortened to what fits."""
    if stderr().options.ascii_only:
        title = title.replace("·", "-")
    return Panel(body, title=Text(title), title_align="left", expand=False, border_style="dim")
