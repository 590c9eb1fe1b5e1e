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

    def lattice(self, draft: DraftScores) -> tuple[mx.array, mx.array, mx.array]:
        """Return candidates [L, K], their unary scores [L, K], and pair scores [L, K, K]."""
        raise NotImplementedError

    def choose(self, requests: Sequence[DraftScores]) -> list[mx.array]:
        """Choose the chain [L] of every request: each slot's best candidate after the one before.

        One pass finds the best successor of *every* candidate. Then a gather per slot follows the
        pointers; the host never waits.
        """
        chains = []
        for draft in requests:
            tokens, scores = self._scored(draft)
            best = scores.argmax(axis=-1)
            path = [best[0, 0]]
            for successors in best[1:]:
                path.append(successors[path[-1]])
            chains.append(mx.take_along_axis(tokens, mx.stack(path)[:, None], axis=-1)[:, 0])
        return chains

    def candidates(self, draft: DraftScores, count: int) -> CandidateTokens:
        """The candidates of the lattice, as many as the network was trained with."""
        tokens, scores = self._scored(draft)
        return CandidateTokens(tokens, log_softmax(scores))

    def _scored(self, draft: DraftScores) -> tuple[mx.array, mx.array]:
        """The candidates [L, K], and their scores [L, K, K] after each candidate before them."""
        tokens, unary_scores, pair_scores = self.lattice(draft)
        return tokens, unary_scores[:, None] + draft.weight * pair_scores


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

    def lattice(self, draft: DraftScores) -> tuple[mx.array, mx.array, mx.array]:
        """Return the lattice of the selector, in the shapes of `LatticeDrafter.lattice`.

        The unary scores include the noise of the target's choice.
        """
        selector = self.candidate_selector
        tokens = top_candidates(draft.scores, selector.top_k)
        unary_scores = mx.take_along_axis(draft.scores, tokens, axis=-1).astype(mx.float32)
        return tokens, unary_scores, selector.pairs(draft.hidden, draft.anchor, tokens)
