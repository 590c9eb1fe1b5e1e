"""`dflash-mlx report`: runs of `bench --out` beside each other, of one machine or of several."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dflash_mlx.bench.report import not_alike, read_run
from dflash_mlx.bench.summary import PLAIN, drafting

from . import options
from .output import make_table, note, print_json, stdout

Runs = dict[str, dict[str, Any]]


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="Folders written by 'dflash-mlx bench --out'."),
    ],
    json: options.Json = False,
) -> None:
    """Compare benchmark runs: speeds, speedups by category, and differences in setup."""
    runs = dict(zip(_names(folders), map(read_run, folders), strict=True))
    if json:
        print_json({"runs": runs, "not_alike": not_alike(runs)})
        return
    stdout().print(_speeds(runs))
    every = dict.fromkeys(way for run in runs.values() for way in run["overall"]["ways"])
    ways = [way for way in drafting(every) if any(_spread(run, way) for run in runs.values())]
    for way in ways:
        stdout().print()
        stdout().print(_speedups(runs, way))
    for name, run in runs.items():
        known = ("chip", "device", "blas", "system", "memory", "mlx", "mlx-lm", "dflash-mlx")
        machine = run["machine"]
        told = ", ".join(f"{key} {machine[key]}" for key in known if key in machine)
        note(f"{name}: {run['title']}; {run['measured']}; {told}")
    for line in not_alike(runs):
        note(f"not asked alike: {line}")


def _names(folders: list[Path]) -> list[str]:
    """Their own names, numbered where several have the same."""
    names: list[str] = []
    for folder in folders:
        name = own = folder.resolve().name
        for number in count(2):
            if name not in names:
                break
            name = f"{own} ({number})"
        names.append(name)
    return names


def _spread(run: Mapping[str, Any], way: str) -> Mapping[str, float] | None:
    """The speedup of a way over all prompts; None where it did not run, or nothing plain did."""
    found = run["overall"]["ways"].get(way)
    return found and found["speedup"]


def _speeds(runs: Runs) -> Table:
    """A line for each run and way."""
    table = make_table(
        "run", "way", "tok/s", "quartiles", "speedup", "tok/round", "first", "identical"
    )
    for name, run in runs.items():
        for way, figures in run["overall"]["ways"].items():
            speed, identical = figures["tokens_per_second"], figures["identical"]
            speedup = figures["speedup"] if way != PLAIN else None
            table.add_row(
                name,
                way,
                f"{speed['median']:,.0f}",
                f"{speed['low']:,.0f}-{speed['high']:,.0f}",
                f"{speedup['median']:.2f}x" if speedup else "-",
                f"{figures['tokens_per_round']:.2f}" if figures["tokens_per_round"] else "-",
                f"{1e3 * figures['first_token_seconds']['median']:,.0f} ms",
                "-" if identical is None else f"{identical}/{run['overall']['prompts']}",
            )
    return table


def _speedups(runs: Runs, way: str) -> Table:
    """A way's speedup: a line for each category, a column for each run."""
    table = make_table(f"{way}, by category", *runs)
    rows = {n: [*run["categories"], run["overall"]] for n, run in runs.items()}
    speedups = {
        name: {row["category"]: row["ways"][way]["speedup"] for row in of if way in row["ways"]}
        for name, of in rows.items()
    }
    for category in dict.fromkeys(row["category"] for of in rows.values() for row in of):
        found = [speedups[name].get(category) for name in runs]
        table.add_row(category, *(f"{one['median']:.2f}x" if one else "-" for one in found))
    return table
