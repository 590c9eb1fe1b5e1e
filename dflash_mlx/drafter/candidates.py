"""The candidates of a block's slots for a tree: chosen on the device, then few enough to be read.

A tree's probabilities are the softmax of the scores that a chain takes the best of. At temperature
0 these are the logits. Above it they are log q + G / s: the noise G of the target's choice is known
beforehand, and s is learnt (see `sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..memory import compute

MOST_CANDIDATES = 32  # per slot; a tree of 64 rows hardly ever has more siblings
NEVER = -50.0  # the log-probability of what top-p, top-k or a grammar excludes
CHUNK = 512  # vocabulary entries per chunk of the top-k search


class DraftScores(NamedTuple):
    """The L slots of one request's block, before tokens are chosen for them.

    Attributes:
        scores: [L, V], what tokens are chosen by, from `Sampler.draft_scores`.
        weight: what one unit of logit counts in the scores.
        hidden: [L, D], the hidden states that gave the logits; [L, 0] with `tokens`.
        anchor: the token before the first slot.
        lattice: of LiLiCorr: candidates [L, K], their own scores [L, K], and scores [L, K, K] after
            each candidate of the slot before.
        tokens: [L], if they were chosen one after the other.
    """

    scores: mx.array
    weight: float
    hidden: mx.array
    anchor: int
    lattice: tuple[mx.array, mx.array, mx.array] | None = None
    tokens: mx.array | None = None


class CandidateTokens(NamedTuple):
    """The tokens that may stand in each of L slots, K each; read when a tree needs them.

    Attributes:
        tokens: [L, K] token ids.
        log_probs: [L, P, K]. P is K if they depend on the candidate in the slot before (DFlash2),
            else 1. The anchor is before the first slot: only its row 0 counts.
    """

    tokens: mx.array
    log_probs: mx.array


def read_candidates(candidates: Sequence[CandidateTokens]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens and log-probabilities of many requests; waits once for the device."""
    compute(candidates)
    return [
        (np.array(tokens), np.maximum(np.array(log_probs, np.float64), NEVER))
        for tokens, log_probs in candidates
    ]


def likeliest(scores: mx.array, count: int, ids: mx.array | None = None) -> CandidateTokens:
    """The `count` most probable tokens of each slot, from scores [L, V].

    With `ids` [DV] the scores are [L, DV], of the tokens with these ids.
    """
    log_probs = log_softmax(scores)
    found = top_candidates(log_probs, min(count, MOST_CANDIDATES, log_probs.shape[-1]))
    log_probs = mx.take_along_axis(log_probs, found, axis=-1)[:, None]
    return CandidateTokens(found if ids is None else ids[found], log_probs)


def log_softmax(scores: mx.array) -> mx.array:
    """Log-probabilities [..., K] in f32, from scores [..., K]."""
    scores = scores.astype(mx.float32)
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


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
