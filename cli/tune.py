"""`dflash-mlx tune`: choose kernels for a model on Metal, and show what its steps take."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

import dflash_mlx
from dflash_mlx.machine.facts import busy

from . import options
from .command_buffers import find_fastest
from .output import NOTHING, make_table, note, print_json, rate, stdout, waiting
from .pair import Pair, open_pair

if TYPE_CHECKING:
    from dflash_mlx.kernels.autotune import Timing

MILLISECONDS = 1e3
PROMPT, TOKENS = "Count from 1 to 40.", 48
ROWS = (1, 2, 4, 8, 12, 16)
SECONDS, REPEATS = 60.0, 5  # of timing kernels; loading takes 3 and 2


def tune(
    context: typer.Context,
    *,
    names: options.Names,
    weights: options.Weights,
    kv_bits: int | None = options.setting("kv_bits"),
    json: bool = options.JSON,
) -> None:
    """On Metal, choose the faster kernels; anywhere, show what the steps of a model take."""
    warning = busy()
    # Only on macOS, because elsewhere there is no Metal, and the BLAS has to come before MLX.
    kernels = _time_kernels(names, weights) if sys.platform == "darwin" else None
    buffers = dict[int | None, float]()
    if kernels is not None:
        with waiting("Timing MLX's command buffers in processes of their own"):
            buffers = find_fastest(options.typed(context))
    pair = open_pair(names, weights)  # with the kernels that have just won
    with waiting("Timing steps of each length"):
        steps = {rows: _milliseconds(pair, rows, kv_bits) for rows in ROWS if rows <= pair.rows}
    if json:
        content: dict[str, Any] = {"model": pair.target.name, "milliseconds": steps}
        timed = None if kernels is None else [asdict(row) for row in kernels]
        sizes = {str(size or "default"): speed for size, speed in buffers.items()}
        print_json(content | {"kernels": timed, "command_buffers": sizes})
        return
    if kernels is not None:
        stdout().print(_kernel_table(kernels), "")
        found = ", ".join(f"{size or 'default'} {rate(one)}" for size, one in buffers.items())
        note(f"Tokens a second by launches per command buffer: {found}; the fastest is used")
    table = make_table("rows of a step", *(f"{rows}" for rows in steps))
    table.add_row("milliseconds", *(f"{taken:,.2f}" for taken in steps.values()))
    stdout().print(table)
    note(f"{pair.title}; decoding learns these figures by itself")
    if warning:
        note(warning)


def _time_kernels(names: options.Names, weights: options.Weights) -> list[Timing] | None:
    """Time the kernels for a model, longer than loading does, and keep the answer.

    None without Metal. Raises the errors of `dflash_mlx.load_target`.
    """
    with waiting("Starting MLX"):
        load_target = dflash_mlx.load_target
        import mlx.core as mx

        from dflash_mlx.kernels.autotune import Stopwatch
        from dflash_mlx.kernels.modules import Kernels
        from dflash_mlx.loading.kernel_plan import time_kernels
    if not mx.metal.is_available():
        return None
    with waiting(f"Loading {names.model}", spinner=False):
        settings = weights.settings | {"adapter": names.adapter, "kernels": "off"}
        target = load_target(names.model, weights.target_bits, **settings)
    with waiting("Timing MLX's kernels and ours in turns"):
        return time_kernels(target, Kernels(), Stopwatch(SECONDS, REPEATS))[1]


def _kernel_table(timings: list[Timing]) -> Table:
    """The timings, without / with each group of our kernels."""
    counts = sorted({rows for timing in timings for rows in timing.stock})
    table = make_table("milliseconds of a verify, without/with our kernels", *map(str, counts))
    for timing in timings:
        cells = [
            f"{MILLISECONDS * timing.stock[rows]:.3g}/{MILLISECONDS * timing.ours[rows]:.3g}"
            if rows in timing.stock
            else NOTHING
            for rows in counts
        ]
        table.add_row(timing.key, *cells)
    return table


def _milliseconds(pair: Pair, rows: int, kv_bits: int | None) -> float:
    """Of a step that verifies so many rows, its draft included."""
    result = dflash_mlx.generate(
        pair.target, pair.drafter, PROMPT, block_size=rows, kv_bits=kv_bits, max_tokens=TOKENS
    )
    stats = result.stats
    return MILLISECONDS * stats.decode_seconds / max(1, stats.rounds)
