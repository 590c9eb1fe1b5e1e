"""Tables of sines and cosines on a CPU, which all rotations of a traced step share.

There MLX has no kernel for `mx.fast.rope`, but some twelve operations, which each layer repeats for
its queries and its keys. `mx.compile` merges equal operations, but not the ranges that these begin
with.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..subclassing import Call, stock_class


class RopeTables:
    """The tables of one step."""

    def __init__(self) -> None:
        # By what they depend on: cosines and sines, and the offset, whose id must stay taken.
        self._tables: dict[tuple[Any, ...], tuple[mx.array, mx.array, mx.array]] = {}

    def rotate(self, stock: Call, rope: Any, x: mx.array, offset: Any = 0) -> Any:
        """What `stock` returns for x [N, H, L, dims] whose first row is at `offset` [1].

        The operations are those of `mx.fast.rope` on a CPU, and so are the bits.
        """
        plain = stock_class(rope) is nn.RoPE and not rope.traditional
        shared = isinstance(offset, mx.array) and offset.shape == (1,) and x.dtype == mx.float32
        if not (plain and shared and rope.dims == x.shape[-1]):
            return stock(rope, x, offset=offset)
        cosines, sines = self._table(rope, x.shape[2], offset)
        half = rope.dims // 2
        first = x[..., :half]
        second = x[..., half:]
        return mx.concatenate(
            [first * cosines - second * sines, first * sines + second * cosines], axis=-1
        )

    def _table(self, rope: Any, rows: int, offset: mx.array) -> tuple[mx.array, mx.array]:
        """The cosines and sines [rows, dims / 2] of positions from `offset` [1] on."""
        key = id(offset), rows, rope.dims, rope.base, rope.scale
        if key not in self._tables:
            half = rope.dims // 2
            positions = (mx.arange(rows, dtype=mx.float32) + offset) * rope.scale
            exponents = mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(rope.base) / half)
            angles = positions[:, None] * mx.exp(exponents)
            self._tables[key] = mx.cos(angles), mx.sin(angles), offset
        cosines, sines, _ = self._tables[key]
        return cosines, sines
