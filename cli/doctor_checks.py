"""What `dflash-mlx doctor` says: a line for each thing that it looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Column, Table
from rich.text import Text

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def table(checks: Sequence[Check]) -> Table:
    """For people."""
    lines = Table.grid("", "", Column(overflow="fold"), padding=(0, 2))  # paths are long
    for check in checks:
        what = Text(check.detail)
        if check.advice:
            what.append(f"\n{check.advice}", style=COLORS[check.status])
        lines.add_row(Text(check.status, style=f"bold {COLORS[check.status]}"), check.name, what)
    return lines
