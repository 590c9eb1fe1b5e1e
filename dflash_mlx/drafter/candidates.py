"""The candidates of a block's slots for a tree: chosen on the device, then few enough to be read.

A tree is built from probabilities. At temperature 0 the drafter's own serve. Above it, the target's
choice follows a noise G that is known beforehand (see `sampling`), and candidates x of a slot get

    P(x) ~ q(x) exp(w sure^4 G(x)),    P(none of them) ~ q(the rest)

where `sure` is the largest q of the slot. A drafter is unsure of a slot mostly because it does not
know the tokens before it; the noise then decides little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from ..sampling import Sampler
    from .context import ContextCache

MOST_CANDIDATES = 32  # per slot; a tree of 64 rows hardly ever has more siblings
NEVER = -50.0  # the log-probability of what top-p, top-k or a grammar excludes
NOISE_WEIGHT, SURE_POWER = 0.2, 4  # w and the exponent of `sure`
LEAST_REST = 1e-4  # the least probability that no candidate is right
CHUNK = 512  # vocabulary entries per chunk of the top-k search


class DraftInput(NamedTuple):
    """What the network reads for one request's draft.

    Attributes:
        anchor: the last committed token.
        block: [B] token ids, the anchor and masks.
        taps: [1, S, K*D], features that enter the context first.
        cache: the context, of each layer.
        sampler: the request's.
    """

    anchor: int
    block: mx.array
    taps: mx.array
    cache: list[ContextCache]
    sampler: Sampler


class Slots(NamedTuple):
    """The L slots of one request's block, before tokens are chosen for them.

    Attributes:
        logits: [L, DV] of the tokens that can be drafted.
        hidden: [L, D], the hidden states that gave the logits.
        anchor: the token before the first slot, an array without axes.
        sampler: the request's.
    """

    logits: mx.array
    hidden: mx.array
    anchor: mx.array
    sampler: Sampler


class Candidates(NamedTuple):
    """The tokens that may stand in each of L slots, K each; read when a tree needs them.

    Attributes:
        tokens: [L, K] token ids.
        log_probs: [L, P, K]. P is K if they depend on the candidate in the slot before (DFlash2),
            else 1. The anchor is before the first slot: only its row 0 counts.
    """

    tokens: mx.array
    log_probs: mx.array

    @classmethod
    def of(cls, tokens: mx.array, log_q: mx.array, noise: mx.array | None) -> Candidates:
        """From the drafter's log-probabilities [L, P, K], and the noise [L, V] of all tokens."""
        if noise is None:
            return cls(tokens, log_q)
        rest = 1 - mx.exp(log_q).sum(axis=-1, keepdims=True)
        scores = with_noise(log_q, mx.take_along_axis(noise, tokens, axis=-1)[:, None])
        total = mx.logsumexp(scores, axis=-1, keepdims=True)
        return cls(tokens, scores - mx.logaddexp(total, mx.log(mx.maximum(rest, LEAST_REST))))


def read_candidates(candidates: Sequence[Candidates]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens and log-probabilities of many requests; waits once for the device."""
    mx.eval(candidates)
    return [
        (np.array(tokens), np.maximum(np.array(log_probs, np.float64), NEVER))
        for tokens, log_probs in candidates
    ]


def with_noise(log_q: mx.array, noise: mx.array | None) -> mx.array:
    """Scores [..., K] by which candidates with log-probabilities [..., K] are ranked."""
    if noise is None:
        return log_q
    return log_q + NOISE_WEIGHT * mx.exp(SURE_POWER * log_q.max(axis=-1, keepdims=True)) * noise


def top_candidates(scores: mx.array, k: int) -> mx.array:
    """The k highest entries of each row of scores [L, V], as indices [L, k] in no order.

    They lie in the k chunks with the highest maxima, so the expensive partition sees k chunks
    instead of the vocabulary: 2 ms, not 17, for 7 rows of 248,320 entries on a CPU core.
    """
    rows, vocabulary = scores.shape
    if vocabulary <= k * CHUNK:
        return mx.argpartition(-scores, k - 1, axis=-1)[:, :k]
    padding = [(0, 0), (0, -vocabulary % CHUNK)]
    chunks = mx.pad(scores, padding, constant_values=-mx.inf).reshape(rows, -1, CHUNK)
    best = mx.argpartition(-chunks.max(axis=-1), k - 1, axis=-1)[:, :k]
    kept = mx.take_along_axis(chunks, best[..., None], axis=1).reshape(rows, -1)
    found = mx.argpartition(-kept, k - 1, axis=-1)[:, :k]
    return mx.take_along_axis(best, found // CHUNK, axis=1) * CHUNK + found % CHUNK
