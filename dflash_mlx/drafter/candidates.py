"""The candidates of a block's slots: chosen on the device, then few enough to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from ..sampling import Sampler

MOST_CANDIDATES = 32  # of a slot; a tree of 64 rows has hardly ever a use for so many siblings
NEVER = -50.0  # the log-probability of what top-p, top-k or a grammar excludes
_CHUNK = 512  # vocabulary entries per chunk of the top-k search


class Slots(NamedTuple):
    """The L slots of one request's block, before anything is chosen for them.

    Attributes:
        logits: [L, DV] of the tokens that can be drafted.
        hidden: [L, D], which they were made of.
        anchor: the token before the first slot, an array of no axes.
        sampler: the request's.
    """

    logits: mx.array
    hidden: mx.array
    anchor: mx.array
    sampler: Sampler


class Ranking(NamedTuple):
    """`Candidates` on the device: tokens [L, K], log_q [L, P, K], noise [L, K] or None."""

    tokens: mx.array
    log_q: mx.array
    noise: mx.array | None

    @classmethod
    def of(cls, tokens: mx.array, log_q: mx.array, noise: mx.array | None) -> Ranking:
        """As the attributes, but with the noise [L, V] of all tokens."""
        if noise is not None:
            noise = mx.take_along_axis(noise, tokens, axis=-1)
        return cls(tokens, log_q, noise)


@dataclass(frozen=True)
class Candidates:
    """What may stand in each of L slots, K tokens each.

    Attributes:
        tokens: [L, K] token ids.
        log_q: [L, P, K] the drafter's log-probabilities, `NEVER` or more: P = K where they depend
            on the candidate in the slot before (DFlash2), else 1. Before the first slot stands the
            anchor, and its row 0 counts.
        noise: [L, K] the target's noise on the candidates; None at temperature 0.
    """

    tokens: np.ndarray
    log_q: np.ndarray
    noise: np.ndarray | None

    @classmethod
    def read(cls, tokens: mx.array, log_q: mx.array, noise: mx.array | None) -> Candidates:
        """Wait for the device and copy what it chose; noise is [L, V]."""
        return cls.read_together([Ranking.of(tokens, log_q, noise)])[0]

    @classmethod
    def read_together(cls, rankings: Sequence[Ranking]) -> list[Candidates]:
        """Wait once for the device and copy what it chose for many requests."""
        mx.eval(rankings)
        return [
            cls(
                np.array(tokens),
                np.maximum(np.array(log_q, np.float64), NEVER),
                None if noise is None else np.array(noise, np.float64),
            )
            for tokens, log_q, noise in rankings
        ]


def top_candidates(scores: mx.array, k: int) -> mx.array:
    """The k highest entries of each row of scores [L, V], as indices [L, k] in no order.

    They lie in the k chunks with the highest maxima, so the expensive partition sees k chunks and
    not the vocabulary: 2 ms instead of 17 for 7 rows of 248,320 entries on a CPU core.
    """
    rows, vocabulary = scores.shape
    if vocabulary <= k * _CHUNK:
        return mx.argpartition(-scores, k - 1, axis=-1)[:, :k]
    padding = [(0, 0), (0, -vocabulary % _CHUNK)]
    chunks = mx.pad(scores, padding, constant_values=-mx.inf).reshape(rows, -1, _CHUNK)
    best = mx.argpartition(-chunks.max(axis=-1), k - 1, axis=-1)[:, :k]
    kept = mx.take_along_axis(chunks, best[..., None], axis=1).reshape(rows, -1)
    found = mx.argpartition(-kept, k - 1, axis=-1)[:, :k]
    return mx.take_along_axis(best, found // _CHUNK, axis=1) * _CHUNK + found % _CHUNK
