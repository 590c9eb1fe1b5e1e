"""What a drafter learns from of its target: tapped layers, choices, the head of the distribution.

Of the target's distribution only the likeliest tokens are kept: the rest of 49,152 or 250,000
probabilities is nearly nothing, and never exists for more rows than `bound` bytes hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..targets import Target

TOP = 16  # tokens of each distribution
BOUND = 256 * 2**20  # bytes of logits that exist at once


class Features(NamedTuple):
    """Of sequences [N, S]; what stands at position s is said after token s.

    Attributes:
        taps: [N, S, K*D], outputs of the tapped layers.
        choices: [N, S], the target's likeliest next tokens.
        tops: [N, S, T], its T likeliest, in no particular order.
        shares: [N, S, T], their probabilities at temperature 1, f32.
    """

    taps: mx.array
    choices: mx.array
    tops: mx.array
    shares: mx.array


def features(
    target: Target, tokens: mx.array, layers: Sequence[int], top: int = TOP, bound: int = BOUND
) -> Features:
    """Teacher-forced features of whole sequences [N, S]; lazy, and without a gradient.

    Args:
        layers: the layers to tap.
        top: T.
        bound: bytes of float32 logits that a part of the sequences may have; longer sequences are
            read in parts, over the target's own caches.
    """
    rows, length = tokens.shape
    top = min(top, target.vocab_size)
    part = max(1, min(length, bound // (4 * target.vocab_size * rows)))
    overrides = target.overrides()
    taps = target.tap(layers, overrides)
    cache = make_prompt_cache(target.model) if part < length else None
    found: list[tuple[mx.array, ...]] = []
    with overrides.installed():
        for start in range(0, length, part):
            piece = tokens[:, start : start + part]
            if found:  # one part's logits at a time
                [piece] = mx.depends([piece], [found[-1][-1]])
            logits = target.model(piece, cache=cache) if cache else target.model(piece)
            found.append((taps.take(piece.shape[1]), *_head(logits.astype(mx.float32), top)))
    return Features(
        *(mx.stop_gradient(mx.concatenate([*parts], axis=1)) for parts in zip(*found, strict=True))
    )


def _head(logits: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Choices, the likeliest tokens, and their probabilities."""
    tops = mx.argpartition(-logits, top - 1, axis=-1)[..., :top]
    likely = mx.take_along_axis(logits, tops, axis=-1)
    shares = mx.exp(likely - mx.logsumexp(logits, axis=-1, keepdims=True))
    return logits.argmax(axis=-1), tops, shares
