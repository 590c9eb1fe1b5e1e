"""`dflash-mlx bench --kernels`: MLX's kernels against ours, for a model's own shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

import dflash_mlx
from dflash_mlx.loading.hub import Hub

from .pair import Choice, bits_of
from .screen import error_line, note, print_json, stdout, waiting

if TYPE_CHECKING:
    from dflash_mlx.bench.kernels import KernelRow

MICROSECONDS = 1e6


def time_kernels(choice: Choice, json: bool) -> None:
    """Time every shape of the model, print the table and keep it: it decides from now on.

    Raises `SettingsError` without Metal, and the errors of `dflash_mlx.load_target`.
    """
    with waiting("Starting MLX"):
        load_target = dflash_mlx.load_target
        from dflash_mlx.bench.kernels import check_metal, kernel_rows
        from dflash_mlx.kernels.calibration import store_timings
        from dflash_mlx.kernels.modules import Kernels
    check_metal()
    with waiting(f"Loading {choice.model}"):
        target = load_target(
            choice.model,
            bits_of(choice.target_bits),
            mode=choice.quant_mode.value,
            group_size=choice.group_size,
            hub=Hub(offline=choice.offline),
            kernels=False,
        )
    with waiting("Timing every shape, with MLX's kernels and ours in turns"):
        rows = list(kernel_rows(target.model, target.config, Kernels()))
    show(rows, json)
    try:
        path = store_timings({row.key: row.timing for row in rows})
    except OSError as error:
        error_line(f"The choice cannot be kept: {error}")
    else:
        note(f"Kept in {path}: models are loaded accordingly from now on.")


def show(rows: list[KernelRow], json: bool) -> None:
    """Print the timings in microseconds, stock / ours, and from how many rows ours runs."""
    if json:
        print_json({"kernels": [_as_json(row) for row in rows]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("shape, stock / ours in µs")
    table.add_column("layers", justify="right")
    for count in rows[0].timing.stock if rows else ():
        table.add_column(f"{count}", justify="right", no_wrap=True)
    table.add_column("ours from", justify="right")
    for row in rows:
        pairs = zip(row.timing.stock.values(), row.timing.ours.values(), strict=True)
        cells = [f"{MICROSECONDS * a:.0f}/{MICROSECONDS * b:.0f}" for a, b in pairs]
        table.add_row(row.key, f"{row.layers}", *cells, f"{row.timing.first_row or '-'}")
    stdout().print(table)


def _as_json(row: KernelRow) -> dict[str, Any]:
    timing = row.timing
    return {
        "shape": row.key,
        "layers": row.layers,
        "stock_us": {rows: MICROSECONDS * value for rows, value in timing.stock.items()},
        "ours_us": {rows: MICROSECONDS * value for rows, value in timing.ours.items()},
        "ours_from": timing.first_row,
    }
