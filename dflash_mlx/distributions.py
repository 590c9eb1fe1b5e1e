"""A seed's Gumbel noise, and the truncations of a distribution: top-p, min-p, top-k."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx


def gumbel(keys: Sequence[tuple[int, int]], vocab_size: int) -> mx.array:
    """Make Gumbel(0, 1) noise [R, V] in f32, one row for each pair of a seed and a position.

    The pair is the Threefry key of the row, so rows do not depend on each other.
    """
    pairs = mx.array(list(keys), mx.uint32)
    return mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(pairs)


def keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """Set all logits to -inf but those of the top tokens whose probabilities add up to `top_p`."""
    ascending = mx.sort(logits, axis=-1)
    # For each token, the probability of all tokens that are more probable.
    above = mx.cumsum(mx.softmax(ascending, axis=-1), axis=-1, reverse=True, inclusive=False)
    # Always keep the most probable token, even if `top_p` is 0 in f32.
    dropped = (above[..., :-1] >= top_p).sum(axis=-1, keepdims=True)
    lowest_kept = mx.take_along_axis(ascending, dropped, axis=-1)
    return mx.where(logits < lowest_kept, -mx.inf, logits)


def keep_min_p(logits: mx.array, min_p: float) -> mx.array:
    """Set logits to -inf whose probability is below `min_p` times the largest."""
    threshold = logits.max(axis=-1, keepdims=True) + math.log(min_p)
    return mx.where(logits < threshold, -mx.inf, logits)


def keep_top_k(logits: mx.array, top_k: int) -> mx.array:
    """Set all but the `top_k` largest logits of each row to -inf; `top_k` < V."""
    others = mx.argpartition(-logits, top_k - 1, axis=-1)[:, top_k:]
    return mx.put_along_axis(logits, others, mx.array(-mx.inf, logits.dtype), axis=-1)
