"""A drafter's context: keys and values of committed tokens, never of blocks.

Each committed token has one row per draft layer, computed from the target's hidden states. The rows
of a block are guesses: they are used during their own pass and then dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..targets import caches
from ..targets.caches import Arrays

ContextCheckpoint = tuple[int, tuple[mx.array, mx.array] | None]


class ContextCache:
    """The context keys and values of one draft layer, for one request.

    A full-attention layer keeps every row, in mlx-lm's `KVCache`. A layer with a sliding window
    keeps the last `window - 1` rows: the first row of the next block sees no further back
    (`query position - key position < window`).
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.offset = 0  # context rows seen so far, and so the absolute position of the next one
        self._full = KVCache()
        self._recent: tuple[mx.array, mx.array] | None = None

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The arrays that hold the rows, to be evaluated together."""
        if self.window is not None:
            return self._recent or ()
        return (self._full.keys, self._full.values) if self._full.offset else ()

    def trim_to(self, offset: int) -> None:
        """Forget the rows from `offset` on. A layer with a window can only `rewind`."""
        self._full.trim(self.offset - offset)
        self.offset = offset

    def checkpoint(self) -> ContextCheckpoint:
        """The current state, for `rewind`; nothing is copied."""
        return self.offset, self._recent

    def rewind(self, checkpoint: ContextCheckpoint) -> None:
        """Forget the rows since the checkpoint."""
        if self.window is None:
            self.trim_to(checkpoint[0])
        self.offset, self._recent = checkpoint

    def rows(self, start: int, end: int) -> Arrays:
        """The keys and values [1, KV, S, head_dim] of S tokens; none if there is a window."""
        return caches.rows(self._full, start, end) if self.window is None else {}

    def recent(self) -> Arrays:
        """The rows of the window; none if there is no window."""
        if self._recent is None:
            return {}
        return {"keys": self._recent[0], "values": self._recent[1]}

    def restore(self, offset: int, rows: Sequence[Arrays], window: Arrays, room: int) -> None:
        """Start with `offset` rows; a layer with a window gets only the last ones."""
        self.offset = offset
        if self.window is None:
            caches.restore(self._full, offset, rows, {}, room)
        else:
            self._recent = window["keys"], window["values"]

    def update(self, keys: mx.array, values: mx.array, block: int) -> tuple[mx.array, mx.array]:
        """Append new context rows and, behind them, the rows of a block, which are not kept.

        Args:
            keys, values: [1, KV, S + block, head_dim], the S new context rows first.
            block: how many of the last rows belong to the block.

        Returns:
            The keys and values held before, the new ones and the block's,
            [1, KV, held + S + block, head_dim]; they stay valid after the block is forgotten.
        """
        self.offset += keys.shape[2] - block
        if self.window is None:
            keys, values = self._full.update_and_fetch(keys, values)
            self._full.trim(block)
            return keys, values
        if self._recent is not None:
            keys = mx.concatenate([self._recent[0], keys], axis=2)
            values = mx.concatenate([self._recent[1], values], axis=2)
        end = keys.shape[2] - block
        start = max(0, end - (self.window - 1))
        self._recent = keys[:, :, start:end], values[:, :, start:end]
        return keys, values
