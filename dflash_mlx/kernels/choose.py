"""Which kernel runs: one table, keyed on chip generation, shape, bits and rows.

Ours run where stock kernels are known to waste time, or where `dflash-mlx tune` measured that ours
are faster: a measurement overrules the table. Measurements are kept in one small file per chip,
version of MLX and text of our kernels. `dflash-mlx roofline` prints the costs below.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from ..machine.chips import Chip
from ..machine.facts import cache_folder
from .shapes import Matrix, attention_key

WIDEST = 16  # rows of a tile, and of the widest chain
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

# Rows from which our kernel runs; generations that are not named keep the stock kernels.
#
# affine: where stock begins to use 32-row tiles. Measured in public on an
#   M3 Max, 5120 -> 17408 in 4 bits: 0.129 ms for 1 row, for 16 rows 0.509 with the stock tile and
#   0.306 with one of 16 rows. No public timing says who wins below stock's limit: stock stays.
# float: from 2 rows on stock has tiles of 32 rows, of 64 where N > K (steel_matmul,
#   mlx/backend/metal/matmul.cpp).
# experts: where the costs below say so. Stock goes row by row (gather_qmv) and reads an expert's
#   weights once a row; ours reads them once, but multiplies half a tile or a whole one for whatever
#   rows there are. With many small experts hardly any two rows share one, and stock is better.
# The M5 is not named: its tensor units (mpp::tensor_ops) beat kernels on SIMD-group matrices.
#   Public timing, M5 Max, 27B in 4 bits, 16 rows: stock 112.6 ms, a kernel on tensor units 53.7.
GENERATIONS = ("M1", "M2", "M3", "M4")
FLOAT_FROM = 2

# Queries up to which stock attention has a kernel that splits the keys, and the most query rows
# per head of keys for it. Beyond, 16 queries run with no split over the keys, and head sizes 192
# and 256 unfused. Source: ScaledDotProductAttention::use_fallback, in
# mlx/backend/metal/scaled_dot_product_attention.cpp. Public timing, M5 Max, 16k keys: 8 queries
# 0.81 ms, 16 queries 1.90.
STOCK_QUERIES, STOCK_QUERY_ROWS = 8, 32


def first_row(chip: Chip | None, matrix: Matrix, measured: Mapping[str, int | None]) -> int | None:
    """The rows from which our kernel multiplies by this matrix, None for never.

    Args:
        chip: where it runs; None for one that is not known.
        matrix: its shape.
        measured: the answer for the shapes (`Matrix.key`) that were timed on this machine.
    """
    if not has_kernel(matrix):
        return None
    if matrix.key in measured:
        return measured[matrix.key]
    if chip is None or chip.generation not in GENERATIONS:
        return None
    if matrix.experts:
        return next((r for r in range(2, WIDEST + 1) if _tile_wins(chip, matrix, r)), None)
    if matrix.kind == "affine":
        return stock_tiles_from(chip, matrix)
    # In float32 even stock's tile multiplies faster than the weights can be read.
    return FLOAT_FROM if matrix.bits == 16 else None


def _tile_wins(chip: Chip, matrix: Matrix, rows: int) -> bool:
    return tile_seconds(chip, matrix, rows) <= stock_seconds(chip, matrix, rows)


def has_kernel(matrix: Matrix) -> bool:
    """Whether one of our kernels can multiply by this matrix at all."""
    if matrix.kind == "float":
        return matrix.bits in (16, 32)
    return matrix.kind == "affine" and matrix.bits in (4, 8) and matrix.group_size in (32, 64, 128)


def attention_from(
    chip: Chip | None,
    heads: int,
    key_heads: int,
    head_dim: int,
    measured: Mapping[str, int | None],
) -> int | None:
    """The queries from which our attention runs, None for never.

    Args:
        chip: where it runs; None for one that is not known.
        heads, key_heads, head_dim: the shape, of queries and of keys.
        measured: as of `first_row`, by `attention_key`.
    """
    key = attention_key(heads, key_heads, head_dim)
    if key in measured:
        return measured[key]
    if chip is None or chip.generation not in GENERATIONS:
        return None
    return min(STOCK_QUERIES, STOCK_QUERY_ROWS * key_heads // heads) + 1


def exact_by_default(model: Iterable[Matrix], measured: Mapping[str, int | None]) -> bool:
    """Whether sending every row through our kernels costs nothing, from 1 row to 16.

    Only this machine's timings (`dflash-mlx tune`) can show it, not the table's estimates.
    """
    return all(has_kernel(matrix) and measured.get(matrix.key) == 1 for matrix in model)


def summary(chip: Chip) -> str:
    """Where our kernels run on a chip of `GENERATIONS`, in one line."""
    limits = _limits(chip)
    return (
        f"4- and 8-bit products from {min(limits)} to {max(limits)} rows on (by shape), 16-bit "
        f"ones from {FLOAT_FROM}, attention from {STOCK_QUERIES + 1} queries, experts that "
        "several rows share"
    )


def is_large(chip: str) -> bool:
    """Whether a chip has so many cores that products need smaller tiles."""
    return bool({"Max", "Ultra"} & set(chip.split()))


def stock_tiles_from(chip: Chip, matrix: Matrix) -> int:
    """The rows from which MLX multiplies by these quantized weights with 32-row tiles."""
    largest = max(matrix.columns, matrix.depth)
    return _limits(chip)[0 if largest <= 2048 else 1 if largest <= 4096 else 2]


def _limits(chip: Chip) -> tuple[int, int, int]:
    return STOCK_TILES["Ultra" if "Ultra" in chip.name else chip.generation]


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


GAIN = 0.98  # of stock's time; a smaller gain may be noise, so stock stays


@dataclass(frozen=True)
class Timing:
    """Seconds of one product by number of rows, with MLX's kernel and with ours."""

    stock: Mapping[int, float]
    ours: Mapping[int, float]

    @property
    def first_row(self) -> int | None:
        """The fewest rows from which ours always wins; None if never."""
        first = None
        for rows in sorted(self.stock, reverse=True):
            if self.ours[rows] > GAIN * self.stock[rows]:
                break
            first = rows
        return first


_TIMED = ("stock", "ours")


def read_timings() -> dict[str, Timing]:
    """This machine's timings, by `Matrix.key`; empty before `tune` has run."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
        return {
            key: Timing(
                *({int(r): float(s) for r, s in timing[way].items()} for way in ("stock", "ours"))
            )
            for key, timing in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # never measured, or not readable


def store_timings(timings: Mapping[str, Timing]) -> Path:
    """Add timings to this machine's. Raises `OSError` where the folder cannot be written."""
    every = read_timings() | dict(timings)
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {key: {"stock": one.stock, "ours": one.ours} for key, one in every.items()}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def choices(timings: Mapping[str, Timing]) -> dict[str, int | None]:
    """The rows from which ours runs, by `Matrix.key`."""
    return {key: timing.first_row for key, timing in timings.items()}


def _file() -> Path:
    sources = sorted(
        path.read_text("utf-8")
        for path in files("dflash_mlx.metal").iterdir()
        if path.name.endswith((".metal", ".h"))
    )
    chip = str(mx.device_info().get("device_name", ""))
    name = hashlib.sha256(repr([chip, version("mlx"), sources]).encode()).hexdigest()[:16]
    return cache_folder("kernels") / f"{name}.json"
