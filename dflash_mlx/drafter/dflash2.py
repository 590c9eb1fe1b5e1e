"""DFlash2: DFlash with convolutions inside the block and a selector that walks over candidates.

A DFlash block is drafted in one pass, so its rows know little of each other. DFlash2 (z-lab, August
2026) adds causal convolutions along the block (`layers.ConvolvedLayer`) and a *candidate selector*,
which scores the top-k tokens of every slot against the candidates of the slot before. It chooses
the chain as a whole.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import mlx.core as mx
import mlx.nn as nn

from .candidates import CandidateTokens, DraftScores, log_softmax, top_candidates
from .config import DraftConfig
from .dflash import DFlash


class CandidateSelector(nn.Module):
    """Scores how well a candidate token follows a predecessor, given the slot's hidden state."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        codebook = (config.vocab_size, config.selector_rank)
        self.top_k = config.selector_top_k
        # One side starts at zero and the other does not: scores are 0, gradients are not.
        self.predecessor_codebook = mx.random.normal(codebook)
        self.successor_codebook = mx.zeros(codebook)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(self, hidden: mx.array, predecessors: mx.array, candidates: mx.array) -> mx.array:
        """<predecessor * projected hidden state, successor> for every pair of a slot.

        hidden is [..., D], predecessors token ids [..., P], candidates token ids [..., C];
        the scores are [..., P, C] in f32.
        """
        state = self.hidden_projection(hidden)[..., None, :]
        before = self.predecessor_codebook[predecessors] * state
        after = self.successor_codebook[candidates]
        return (before @ after.swapaxes(-1, -2)).astype(mx.float32)

    def pairs(self, hidden: mx.array, anchor: int, candidates: mx.array) -> mx.array:
        """Scores [L, K, K] of candidates [L, K] after each candidate of the slot before.

        The first slot's only predecessor is the anchor, repeated to fill the row.
        """
        first = mx.full((1, candidates.shape[1]), anchor, candidates.dtype)
        return self.scores(hidden, mx.concatenate([first, candidates[:-1]]), candidates)


class LatticeDrafter(DFlash):
    """A drafter that scores the candidates of a slot after each one of the slot before."""

    def lattice(self, slots: DraftScores) -> tuple[mx.array, mx.array, mx.array]:
        """Candidates [L, K], their own scores [L, K], and scores [L, K, K] after each other."""
        raise NotImplementedError

    def choose(self, requests: Sequence[DraftScores]) -> list[mx.array]:
        """The chain [L] of every request: each slot's best candidate after the one before it.

        The best successor of *every* candidate is found in one pass. Then a gather per slot follows
        the pointers; the host never waits.
        """
        chains = []
        for slots in requests:
            tokens, scores = self._scored(slots)
            best = scores.argmax(axis=-1)
            path = [best[0, 0]]
            for successors in best[1:]:
                path.append(successors[path[-1]])
            chains.append(mx.take_along_axis(tokens, mx.stack(path)[:, None], axis=-1)[:, 0])
        return chains

    def candidates(self, slots: DraftScores, count: int) -> CandidateTokens:
        """The lattice: as many candidates as it was trained for, after each one before them."""
        tokens, scores = self._scored(slots)
        return CandidateTokens(tokens, log_softmax(scores))

    def _scored(self, slots: DraftScores) -> tuple[mx.array, mx.array]:
        tokens, own, pairs = self.lattice(slots)
        return tokens, own[:, None] + slots.weight * pairs


class DFlash2(LatticeDrafter):
    """The DFlash2 drafter: used, cached and fed exactly as a DFlash one."""

    def __init__(self, config: DraftConfig, parts: Container[str] = ()) -> None:
        super().__init__(config, parts)
        self.candidate_selector = CandidateSelector(config)

    def to_full_vocab(self, scores: mx.array) -> mx.array:
        """Scores [L, V], minus infinity beyond the selector's vocabulary."""
        end = self.config.selector_vocab_size
        if end is None:
            return scores
        return mx.where(mx.arange(scores.shape[-1]) < end, scores, -mx.inf)

    def lattice(self, slots: DraftScores) -> tuple[mx.array, mx.array, mx.array]:
        """See `LatticeDrafter`; own scores contain the noise of the target's choice."""
        selector = self.candidate_selector
        tokens = top_candidates(slots.scores, selector.top_k)
        own = mx.take_along_axis(slots.scores, tokens, axis=-1).astype(mx.float32)
        return tokens, own, selector.pairs(slots.hidden, slots.anchor, tokens)
