"""The part of `dflash-mlx tune` that needs Metal: MLX's kernels against ours, shape by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

import dflash_mlx

from .options import Names, Weights, bits_of
from .output import NOTHING, error_line, make_table, waiting

if TYPE_CHECKING:
    from dflash_mlx.bench.kernels import KernelRow

MICROSECONDS = 1e6


def time_kernels(names: Names, weights: Weights, again: bool) -> list[KernelRow] | None:
    """Time every shape of the model that is not known, and keep that; None without Metal.

    Raises the errors of `dflash_mlx.load_target`.
    """
    with waiting("Starting MLX"):
        load_target = dflash_mlx.load_target
        import mlx.core as mx

        from dflash_mlx.bench.kernels import kernel_rows
        from dflash_mlx.kernels.calibration import read_timings, store_timings
        from dflash_mlx.kernels.modules import Kernels
    if not mx.metal.is_available():
        return None
    with waiting(f"Loading {names.model}"):
        bits = bits_of(weights.target_bits)
        target = load_target(names.model, bits, **weights.settings, kernels=False)
    with waiting("Timing every shape, with MLX's kernels and ours in turns"):
        known = {} if again else read_timings()
        rows = list(kernel_rows(target.model, target.config, Kernels(), known))
    try:
        store_timings({row.key: row.timing for row in rows})
    except OSError as error:
        error_line(f"The choice of kernels cannot be kept: {error}")
    return rows


def table(rows: list[KernelRow]) -> Table:
    """The timings, stock / ours, and from how many rows ours runs."""
    counts = [f"{count}" for count in (rows[0].timing.stock if rows else ())]
    table = make_table("microseconds, stock/ours", "layers", *counts, "ours from")
    for row in rows:
        pairs = zip(row.timing.stock.values(), row.timing.ours.values(), strict=True)
        cells = [f"{MICROSECONDS * a:.0f}/{MICROSECONDS * b:.0f}" for a, b in pairs]
        table.add_row(row.key, f"{row.layers}", *cells, f"{row.timing.first_row or NOTHING}")
    return table


def as_json(row: KernelRow) -> dict[str, Any]:
    """One shape, as `--json` prints it."""
    timing = row.timing
    return {
        "shape": row.key,
        "layers": row.layers,
        "stock_us": {rows: MICROSECONDS * value for rows, value in timing.stock.items()},
        "ours_us": {rows: MICROSECONDS * value for rows, value in timing.ours.items()},
        "ours_from": timing.first_row,
    }
