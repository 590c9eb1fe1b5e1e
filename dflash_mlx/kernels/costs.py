"""Seconds of a product on a chip that is not here, by its published limits, for the roofline.

Nothing here decides what runs: `autotune` times that.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..machine.chips import Chip
from .choose import WIDEST
from .shapes import Matrix

HALF = 8  # up to this many rows, half a tile is multiplied
# What half a tile costs, in rows of a whole one: the weights are unpacked for 8 rows as for 16. An
# estimate, from 4 operations to unpack a weight and 1.25 for each row.
HALF_COST = 10

# Rows from which MLX 0.32 leaves its vector kernels for 32-row tiles, for quantized weights with N
# and K <= 2048, <= 4096 and larger. Source: get_qmv_batch_limit, mlx/backend/metal/quantized.cpp.
STOCK_TILES = {
    "M1": (14, 10, 6),
    "M2": (14, 10, 6),
    "M3": (13, 15, 13),
    "M4": (13, 15, 13),
    "M5": (33, 25, 13),
    "Ultra": (32, 18, 12),  # whatever its generation
}

# Where the costs below are the guess. Measured in public on an M3 Max, 5120 -> 17408 in 4 bits:
# 0.129 ms for 1 row, for 16 rows 0.509 with the stock tile and 0.306 with one of 16 rows. The M5 is
# not named: what its tensor units (mpp::tensor_ops) add to stock kernels is known in part only.
# Public timing, M5 Max, 27B in 4 bits, 16 rows: stock 112.6 ms, a kernel on tensor units 53.7.
GENERATIONS = ("M1", "M2", "M3", "M4")
FEWEST = 4  # rows for which a public timing shows a tile of 16 rows ahead (ml-explore/mlx#3839)


def guess(chip: Chip | None, together: Sequence[Matrix]) -> frozenset[int]:
    """The rows at which our kernels are expected to be faster for all these matrices."""
    if chip is None or chip.generation not in GENERATIONS:
        return frozenset()
    return frozenset(
        rows
        for rows in range(FEWEST, WIDEST + 1)
        if sum(tile_seconds(chip, matrix, rows) for matrix in together)
        < sum(stock_seconds(chip, matrix, rows) for matrix in together)
    )


def stock_tiles_from(chip: Chip, matrix: Matrix) -> int:
    """The rows from which MLX multiplies by these quantized weights with 32-row tiles."""
    largest = max(matrix.columns, matrix.depth)
    limits = STOCK_TILES["Ultra" if "Ultra" in chip.name else chip.generation]
    return limits[0 if largest <= 2048 else 1 if largest <= 4096 else 2]


def stock_seconds(chip: Chip, matrix: Matrix, rows: int) -> float:
    """Seconds of MLX's kernels for this many rows: an estimate from the chip's limits."""
    once, weights = chip.reading(matrix.size), matrix.columns * matrix.depth
    if matrix.experts:
        return rows * matrix.top_k * once
    if matrix.kind == "float":
        tile = 64 if matrix.columns > matrix.depth else 32
        return once if rows == 1 else max(once, chip.multiplying(tile, weights, chip.stock_share))
    tiles = max(once, chip.multiplying(32, weights, chip.stock_share))
    # No timing of the vector kernels at 2 rows and more is public: a line up to the tiles' time.
    return once + (tiles - once) * min(1.0, (rows - 1) / (stock_tiles_from(chip, matrix) - 1))


def tile_seconds(chip: Chip, matrix: Matrix, rows: int) -> float:
    """Seconds of our kernels for up to 16 rows: an estimate from the chip's limits."""
    read, weights = chip.reading(matrix.size), matrix.columns * matrix.depth
    half, whole = (max(read, chip.multiplying(cost, weights)) for cost in (HALF_COST, WIDEST))
    crowded = matrix.crowded(rows, HALF)
    return (matrix.active(rows) - crowded) * half + crowded * whole
