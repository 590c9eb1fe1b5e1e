"""Which kernel runs, by the form of the weights or of the attention, and the number of rows.

`targets.autotune` times both when a model is loaded here for the first time. The answer is kept in
one small file per machine, macOS, MLX, text of our kernels and model. Before that, and for what
was not timed, the costs below are the guess. `dflash-mlx roofline` prints them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..machine.chips import Chip
from ..machine.facts import cache_folder
from .block_attention import MOST_NODES
from .shapes import Matrix

Rows = Mapping[str, frozenset[int]]  # the rows at which ours run, by form
NONE: frozenset[int] = frozenset()

WIDEST = 16  # rows of a tile, and of the widest chain
# What is timed: rows, and keys that attention reads.
ROWS, DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16), (1024, 4096, 16384)
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

# Queries up to which stock attention has a kernel that splits the keys, and the most query rows
# per head of keys for it. Beyond, 16 queries run with no split over the keys, and head sizes 192
# and 256 unfused. Source: has_fused_kernel, in
# mlx/backend/metal/scaled_dot_product_attention.cpp.
STOCK_QUERIES, STOCK_QUERY_ROWS = 8, 32
# Where two stock calls of 8 queries take less time than one of 16: public timings (ml-explore/mlx
# #3826) with 4 heads of 128 per head of keys, M5 Max 1.17x with 16k keys and 1.38x with 32k, M3 Max
# 1.10x and 1.14x. A small chip is full without a split.
SPLIT_KEYS, SPLIT_HEAD_DIMS = 16384, (64, 96, 128)


def guess(chip: Chip | None, together: Sequence[Matrix]) -> frozenset[int]:
    """The rows at which our kernels are expected to be faster, before they were timed.

    Args:
        chip: where they run; None for one that is not known.
        together: the matrices whose kernels are chosen together.
    """
    if chip is None or chip.generation not in GENERATIONS:
        return NONE
    return frozenset(
        rows
        for rows in range(FEWEST, WIDEST + 1)
        if sum(tile_seconds(chip, matrix, rows) for matrix in together)
        < sum(stock_seconds(chip, matrix, rows) for matrix in together)
    )


def guess_attention(chip: Chip | None, heads: int, key_heads: int) -> frozenset[int]:
    """The same of attention, by its number of queries. Queries and keys have so many heads."""
    if chip is None or chip.generation not in GENERATIONS:
        return NONE
    first = min(STOCK_QUERIES, STOCK_QUERY_ROWS * key_heads // heads) + 1
    return frozenset(range(first, MOST_NODES + 1))


def takes_two_calls(heads: int, key_heads: int, head_dim: int, rows: int, depth: int) -> bool:
    """Whether MLX's attention over `depth` keys is faster in two calls, on a large chip."""
    return (
        depth >= SPLIT_KEYS
        and STOCK_QUERIES < rows <= 2 * STOCK_QUERIES
        and STOCK_QUERIES * heads <= STOCK_QUERY_ROWS * key_heads
        and head_dim in SPLIT_HEAD_DIMS
    )


def attention_rows(rows: Rows, key: str, depth: int) -> frozenset[int]:
    """The queries for which our attention runs.

    Args:
        rows: the choices for a model.
        key: as of `attention_key`.
        depth: how many keys there are.
    """
    at = next((each for each in DEPTHS if depth <= each), DEPTHS[-1])
    return rows.get(key_at(key, at), NONE)


def key_at(key: str, depth: int) -> str:
    """The name of attention over so many keys."""
    return f"{key} at {depth}"


def chosen(
    won: Container[int],
    most: int = WIDEST,
    timed: Container[int] = ROWS,
    guessed: Container[int] = NONE,
) -> frozenset[int]:
    """All rows at which ours run, where it `won` at these of `ROWS`.

    Other numbers of rows are decided by the next one in `ROWS`, and more than 16 by 16. If that was
    not `timed`, they run where it is `guessed`.
    """

    def runs(rows: int) -> bool:
        decides = next((each for each in ROWS if rows <= each), WIDEST)
        return decides in won if decides in timed else rows in guessed

    return frozenset(filter(runs, range(1, most + 1)))


def has_kernel(matrix: Matrix) -> bool:
    """Whether one of our kernels can multiply by this matrix at all."""
    if matrix.kind == "float":
        return matrix.bits in (16, 32)
    return matrix.kind == "affine" and matrix.bits in (4, 8) and matrix.group_size in (32, 64, 128)


def has_tensor_units(device: Mapping[str, Any], macos: str) -> bool:
    """Whether a GPU multiplies bfloat16 by 4 bits in tensor units: an M5's, from macOS 26.4 on.

    The architecture is asked as in MLX's is_nax_available (mlx/backend/metal/device.cpp). 4-bit
    tensors came with macOS 26.4. MLX compiles custom kernels as Metal 4.0 or later there.

    Args:
        device: as of `mx.device_info`.
        macos: the version, "26.4"; "" elsewhere.
    """
    found = re.fullmatch(r"applegpu_g(\d+)(\w)", str(device.get("architecture")))
    if found is None or int(found[1]) < (18 if found[2] == "p" else 17):
        return False
    return tuple(map(int, re.findall(r"\d+", macos)[:2])) >= (26, 4)


def tensor_key(key: str) -> str:
    """The name of weights on tensor units. In `Rows`, they run on those at all rows of `key`."""
    return f"{key} on tensor units"


def exact_by_default(model: Iterable[Matrix], rows: Rows) -> bool:
    """Whether sending every row through our kernels costs nothing, from 1 row to 16.

    Only this machine's timings can show it: a guess never has one row. Exact decoding keeps off
    tensor units, so what won on those shows nothing.
    """
    every = set(range(1, WIDEST + 1))
    return all(
        has_kernel(matrix)
        and every <= rows.get(matrix.key, NONE)
        and not rows.get(tensor_key(matrix.key))
        for matrix in model
    )


def is_large(chip: str) -> bool:
    """Whether a chip has so many cores that products need smaller tiles."""
    return bool({"Max", "Ultra"} & set(chip.split()))


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


def read_choices(forms: Iterable[str]) -> Rows | None:
    """What was timed here for a model with these forms; None where nothing was."""
    model, path = _identity(forms)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["timed"] != model:
            return None
        return {key: frozenset(map(int, rows)) for key, rows in content["rows"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # never timed, or not readable


def store_choices(forms: Iterable[str], rows: Rows) -> None:
    """Keep the choices. Raises `OSError` where the folder cannot be written."""
    model, path = _identity(forms)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"timed": model, "rows": {key: sorted(of) for key, of in rows.items()}}
    path.write_text(json.dumps(content), encoding="utf-8")


def _identity(forms: Iterable[str]) -> tuple[dict[str, Any], Path]:
    """What timings depend on, as in their file: machine, MLX and others; and the file."""
    sources = sorted(
        path.read_text("utf-8")
        for path in files("dflash_mlx.metal").iterdir()
        if path.name.endswith((".metal", ".h"))
    )
    device = mx.device_info()
    identity = {
        "machine": [str(device.get(name)) for name in ("device_name", "memory_size")],
        "macos": platform.mac_ver()[0],  # its compiler, and what it offers of tensor units
        "mlx": version("mlx"),
        "kernels": hashlib.sha256("".join(sources).encode()).hexdigest(),
        "model": dict(sorted(Counter(forms).items())),
    }
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return identity, cache_folder("kernels") / f"{name}.json"
