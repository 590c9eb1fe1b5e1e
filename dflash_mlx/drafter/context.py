"""A drafter's context: keys and values of committed tokens, never of blocks.

Each committed token has one row per draft layer, computed from the target's hidden states. The rows
of a block are guesses: they are used during their own pass and then dropped. The rows are in
mlx-lm's caches, so `targets.caches` trims, stores and restores them as a target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..targets.internals import KVCache, RotatingKVCache, fill_window, window_of

ContextCache = Any  # of one layer: a `KVCache`, or a `RotatingKVCache` if it has a sliding window


def make_context(windows: Sequence[int | None]) -> list[ContextCache]:
    """An empty cache per layer, from the layers' sliding windows; None for full attention."""
    return [KVCache() if window is None else RotatingKVCache(window) for window in windows]


def append_rows(
    cache: ContextCache, keys: mx.array, values: mx.array, block: int
) -> tuple[mx.array, mx.array]:
    """Append new context rows and, behind them, the rows of a block, which are not kept.

    A layer with a sliding window keeps the last `window - 1` rows: the first row of the next block
    sees no further back (`query position - key position < window`).

    Args:
        cache: of one layer; its `offset` counts the context's rows, seen so far.
        keys, values: [1, KV, S + block, head_dim], the S new context rows first.
        block: how many of the last rows belong to the block.

    Returns:
        The keys and values held before, the new ones and the block's,
        [1, KV, held + S + block, head_dim]; they stay valid after the block is forgotten.
    """
    if isinstance(cache, KVCache):
        keys, values = cache.update_and_fetch(keys, values)
        cache.trim(block)
        return keys, values
    position = cache.offset + keys.shape[2] - block
    if cache.offset:
        older_keys, older_values = window_of(cache)
        keys = mx.concatenate([older_keys, keys], axis=2)
        values = mx.concatenate([older_values, values], axis=2)
    end = keys.shape[2] - block
    start = max(0, end - (cache.max_size - 1))
    fill_window(cache, position, keys[:, :, start:end], values[:, :, start:end])
    return keys, values
