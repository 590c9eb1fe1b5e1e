"""`dflash-mlx tune`: chooses kernels for a model on Metal, and times its steps."""

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

MILLISECONDS = 1e3  # per second
PROMPT = "Count from 1 to 40."
TOKENS = 48
TIMED_ROWS = (1, 2, 4, 8, 12, 16)
# How long to time kernels, and how often. A model's first load takes 3 seconds and 2 repeats.
KERNEL_SECONDS = 60.0
KERNEL_REPEATS = 5


def tune(
    context: typer.Context,
    *,
    names: options.Names,
    weights: options.Weights,
    kv_bits: int | None = options.setting("kv_bits"),
    json: bool = options.JSON,
) -> None:
    """Show how long the steps of a model take; on Metal, also choose the faster kernels."""
    warning = busy()
    # Only on macOS: elsewhere there is no Metal, and the BLAS must be chosen before MLX starts.
    timings = _time_kernels(names, weights) if sys.platform == "darwin" else None
    speeds: dict[int | None, float] = {}  # by the size of command buffers
    if timings is not None:
        with waiting("Timing MLX's command buffers in new processes"):
            speeds = find_fastest(options.given_options(context))
    pair = open_pair(names, weights)  # with the kernels that were fastest
    with waiting("Timing steps of each length"):
        steps = {
            rows: _milliseconds(pair, rows, kv_bits) for rows in TIMED_ROWS if rows <= pair.rows
        }
    if json:
        content: dict[str, Any] = {
            "model": pair.target.name,
            "milliseconds": steps,
            "kernels": None if timings is None else [asdict(timing) for timing in timings],
            "command_buffers": {str(size or "default"): speed for size, speed in speeds.items()},
        }
        print_json(content)
        return
    if timings is not None:
        stdout().print(_kernel_table(timings), "")
        texts = [f"{size or 'default'} {rate(speed)}" for size, speed in speeds.items()]
        note(
            f"Tokens per second by launches per command buffer: {', '.join(texts)}; "
            "the fastest is used"
        )
    table = make_table("rows of a step", *map(str, steps))
    table.add_row("milliseconds", *(f"{milliseconds:,.2f}" for milliseconds in steps.values()))
    stdout().print(table)
    note(f"{pair.title}; decoding learns these figures by itself")
    if warning:
        note(warning)


def _time_kernels(names: options.Names, weights: options.Weights) -> list[Timing] | None:
    """Time the kernels for a model for longer than its first load does, and keep the results.

    Returns None without Metal. Raises the errors of `dflash_mlx.load_target`.
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
        stopwatch = Stopwatch(KERNEL_SECONDS, KERNEL_REPEATS)
        _, timings = time_kernels(target, Kernels(), stopwatch)
        return timings


def _kernel_table(timings: list[Timing]) -> Table:
    """Make a table of the timings, without and with each group of our kernels."""
    counts = sorted({rows for timing in timings for rows in timing.stock})
    table = make_table(
        "milliseconds of a verification, without/with our kernels", *map(str, counts)
    )
    for timing in timings:
        cells = [timing.key]
        for rows in counts:
            if rows in timing.stock:
                stock = MILLISECONDS * timing.stock[rows]
                ours = MILLISECONDS * timing.ours[rows]
                cells.append(f"{stock:.3g}/{ours:.3g}")
            else:
                cells.append(NOTHING)
        table.add_row(*cells)
    return table


def _milliseconds(pair: Pair, rows: int, kv_bits: int | None) -> float:
    """Time a step that verifies this many rows, including its draft."""
    result = dflash_mlx.generate(
        pair.target,
        pair.drafter,
        PROMPT,
        block_size=rows,
        kv_bits=kv_bits,
        max_tokens=TOKENS,
    )
    stats = result.stats
    return MILLISECONDS * stats.decode_seconds / max(1, stats.rounds)
