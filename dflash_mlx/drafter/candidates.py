"""Chooses the candidates for a tree on the device, so that few of them have to be read.

A chain takes the best scores of its slots; a tree takes the softmax of the same scores as
probabilities. At temperature 0 the scores are the logits. Above it they are log q + G / s, where
the noise G of the target's choice is known beforehand and s is fixed (`sampling.DRAFT_SCALE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..memory import compute

# Candidates per slot: a tree of 64 rows hardly ever has more siblings.
MAX_CANDIDATES = 32
# The log-probability of tokens that top-p, top-k or a grammar excludes.
EXCLUDED_LOG_PROB = -50.0
# Vocabulary entries per chunk of the top-k search.
TOP_K_CHUNK = 512


class DraftScores(NamedTuple):
    """The scores of the L slots of one request's draft, before tokens are chosen for them.

    Attributes:
        scores: [L, V], from `Sampler.draft_scores`; tokens are chosen by these.
        weight: 1 when greedy, 1 / temperature when sampling; scales any bias added to the scores.
        hidden: [L, D], the hidden states that the logits come from; [L, 0] with `tokens`.
        anchor: the token before the first slot.
        lattice: for LiLiCorr: the candidates [L, K], their unary scores [L, K], and their pair
            scores [L, K, K] after each candidate of the slot before.
        tokens: [L], if they were chosen one after the other; else None.
    """

    scores: mx.array
    weight: float
    hidden: mx.array
    anchor: int
    lattice: tuple[mx.array, mx.array, mx.array] | None = None
    tokens: mx.array | None = None


class CandidateTokens(NamedTuple):
    """K candidate tokens for each of L slots; they are read when a tree needs them.

    Attributes:
        tokens: [L, K] token ids.
        log_probs: [L, P, K]. P is K if they depend on the candidate in the slot before (DFlash2),
            else 1. The first slot follows the anchor, so only its row 0 counts.
    """

    tokens: mx.array
    log_probs: mx.array


def read_candidates(candidates: Sequence[CandidateTokens]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read the tokens and log-probabilities of many requests; waits once for the device."""
    compute(candidates)
    return [
        # The log-probabilities of a slot are NaN where all of its tokens are excluded.
        (np.array(tokens), np.fmax(np.array(log_probs, np.float64), EXCLUDED_LOG_PROB))
        for tokens, log_probs in candidates
    ]


def top_tokens(scores: mx.array, count: int, ids: mx.array | None = None) -> CandidateTokens:
    """The `count` most probable tokens of each slot, from scores [L, V].

    With `ids` [DV], the scores are [L, DV] and belong to the tokens with these ids.
    """
    log_probs = log_softmax(scores)
    indices = top_candidates(log_probs, min(count, MAX_CANDIDATES, log_probs.shape[-1]))
    log_probs = mx.take_along_axis(log_probs, indices, axis=-1)[:, None]
    return CandidateTokens(indices if ids is None else ids[indices], log_probs)


def log_softmax(scores: mx.array) -> mx.array:
    """Log-probabilities [..., K] in f32, from scores [..., K]."""
    scores = scores.astype(mx.float32)
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


def top_candidates(scores: mx.array, k: int) -> mx.array:
    """The k highest entries of each row of scores [L, V], as indices [L, k] in no order.

    They lie in the k chunks with the highest maxima, so the expensive partition sees k chunks
    instead of the vocabulary: 2 ms instead of 17 for 7 rows of 248,320 entries on a CPU core.
    """
    rows, vocabulary = scores.shape
    if vocabulary <= k * TOP_K_CHUNK:
        return mx.argpartition(-scores, k - 1, axis=-1)[:, :k]
    padding = [(0, 0), (0, -vocabulary % TOP_K_CHUNK)]
    chunks = mx.pad(scores, padding, constant_values=-mx.inf).reshape(rows, -1, TOP_K_CHUNK)
    best = mx.argpartition(-chunks.max(axis=-1), k - 1, axis=-1)[:, :k]
    kept = mx.take_along_axis(chunks, best[..., None], axis=1).reshape(rows, -1)
    places = mx.argpartition(-kept, k - 1, axis=-1)[:, :k]
    chunk_numbers = mx.take_along_axis(best, places // TOP_K_CHUNK, axis=1)
    return chunk_numbers * TOP_K_CHUNK + places % TOP_K_CHUNK
