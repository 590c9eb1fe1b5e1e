"""A seed's Gumbel noise, and the truncations of a distribution: top-p, min-p, top-k."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx


def gumbel(keys: Sequence[tuple[int, int]], vocab_size: int) -> mx.array:
    """Gumbel(0, 1) noise [R, V] in f32: a row for each seed and position.

    The pair is the row's Threefry key, so rows do not depend on each other.
    """
    pairs = mx.array([*keys], mx.uint32)
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(pairs)


def keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """Set all but the most probable tokens that together have `top_p` to -inf."""
    ascending = mx.sort(logits, axis=-1)
    above = mx.cumsum(mx.softmax(ascending, axis=-1), axis=-1, reverse=True, inclusive=False)
    # The most probable token always stays, even if `top_p` is 0 in f32.
    dropped = (above[..., :-1] >= top_p).sum(axis=-1, keepdims=True)
    return mx.where(logits < mx.take_along_axis(ascending, dropped, axis=-1), -mx.inf, logits)


def keep_min_p(logits: mx.array, min_p: float) -> mx.array:
    """Set tokens with less than `min_p` times the largest probability to -inf."""
    least = logits.max(axis=-1, keepdims=True) + math.log(min_p)
    return mx.where(logits < least, -mx.inf, logits)


def keep_top_k(logits: mx.array, top_k: int) -> mx.array:
    """Set all but the `top_k` largest logits of each row to -inf; `top_k` < V."""
    others = mx.argpartition(-logits, top_k - 1, axis=-1)[:, top_k:]
    return mx.put_along_axis(logits, others, mx.array(-mx.inf, logits.dtype), axis=-1)
