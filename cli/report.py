"""`dflash-mlx report`: benchmark runs of one or several machines, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dflash_mlx.bench.report import read_run
from dflash_mlx.bench.summary import PLAIN, drafting_methods

from . import options
from .output import NOTHING, make_table, note, print_json, rate, stdout, times

Runs = dict[str, dict[str, Any]]
SETUP = (
    *("suite", "max_tokens", "temperature", "block_size"),
    *("chip", "device", "blas", "system", "memory", "mlx", "mlx-lm", "dflash-mlx"),
)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="Folders written by 'dflash-mlx bench --out'."),
    ],
    json: options.Json = False,
) -> None:
    """Compare benchmark runs: speeds, speedups by category, and the setup of each."""
    runs = {str(folder): read_run(folder) for folder in folders}
    if json:
        print_json({"runs": runs})
        return
    stdout().print(_speeds(runs))
    overall = [run["overall"]["methods"] for run in runs.values()]
    for method in drafting_methods({name: None for methods in overall for name in methods}):
        if any(method in methods and methods[method]["speedup"] for methods in overall):
            stdout().print()
            stdout().print(_speedups(runs, method))
    for name, run in runs.items():
        setup = run | run["machine"]
        known = ", ".join(f"{key} {setup[key]}" for key in SETUP if key in setup)
        note(f"{name}: {run['title']}; {run['measured']}; {known}")


def _speeds(runs: Runs) -> Table:
    """A row for each run and method."""
    titles = ("tok/s", "quartiles", "speedup", "acceptance", "first", "identical")
    table = make_table("run", "method", *titles)
    for name, run in runs.items():
        for method, figures in run["overall"]["methods"].items():
            speed, identical = figures["tokens_per_second"], figures["identical"]
            speedup = figures["speedup"] if method != PLAIN else None
            acceptance = figures["acceptance_length"]
            table.add_row(
                name,
                method,
                rate(speed["median"]),
                f"{rate(speed['low'])}-{rate(speed['high'])}",
                times(speedup["median"], acceptance) if speedup else NOTHING,
                f"{acceptance:.2f}" if acceptance else NOTHING,
                f"{1e3 * figures['first_token_seconds']['median']:,.0f} ms",
                NOTHING if identical is None else f"{identical}/{run['overall']['prompts']}",
            )
    return table


def _speedups(runs: Runs, method: str) -> Table:
    """A method's speedup: a row for each category, a column for each run."""
    table = make_table(f"{method}, by category", *runs)
    by_run = {
        name: {row["category"]: row["methods"].get(method) for row in _rows(run)}
        for name, run in runs.items()
    }
    for category in dict.fromkeys(row["category"] for run in runs.values() for row in _rows(run)):
        found = [by_run[name].get(category) for name in runs]
        speedups = [figures and figures["speedup"] for figures in found]
        table.add_row(category, *(f"{one['median']:.2f}x" if one else NOTHING for one in speedups))
    return table


def _rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [*run["categories"], run["overall"]]
