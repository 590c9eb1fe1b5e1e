"""Drafting token by token: each slot's input is the token before it and the network's own state.

EAGLE-3 heads and heads for multi-token prediction pair the features of a token with the embedding
of the *next* token. So the newest features wait until that token is known, and a draft begins with
them and the anchor. Its further rows are made of the network's own outputs. They leave the cache
after the draft, even if the target accepts their tokens: kept rows come from the target's features.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kernels.shapes import weight_bytes
from ..proposal import Proposal
from ..sampling import Sampler
from ..targets import caches
from .candidates import likeliest, read_candidates
from .protocol import SupportsSharing, SupportsTrees
from .session import FeatureSession
from .tree import DraftTree

if TYPE_CHECKING:
    from ..targets import Target

BLOCK_SIZE = 8  # the most rows of a draft, which costs more with each


class StepwiseDrafter:
    """A network that drafts one token at a time; mixed into an MLX module.

    Attributes:
        drafts_add_rows: whether drafted rows enter its caches.
    """

    drafts_trees = drafts_add_rows = True

    @property
    def block_size(self) -> int:
        """The most rows of a draft, the anchor included."""
        return BLOCK_SIZE

    def make_cache(self) -> list[Any]:
        """Empty caches of mlx-lm's kinds that can be trimmed."""
        raise NotImplementedError

    def fuse(self, taps: mx.array) -> mx.array:
        """Features [1, S, D] from the concatenated taps [1, S, K*Dt]; here these themselves."""
        return taps

    def advance(
        self, features: mx.array, tokens: mx.array, cache: list[Any], target: Target
    ) -> mx.array:
        """Hidden states [1, S, D] after S rows, which the cache keeps.

        Each row has the features [1, S, D] of a token, and the token after it, of `tokens` [1, S].
        """
        raise NotImplementedError

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Logits [1, S, DV] of hidden states [1, S, D], for the tokens that can be drafted."""
        raise NotImplementedError

    def feedback(self, hidden: mx.array) -> mx.array:
        """The features [1, S, D] of the next rows; here the hidden states [1, S, D]."""
        return hidden

    def widen(self, scores: mx.array) -> mx.array:
        """Scores [L, DV] as scores [L, V]; here all tokens can be drafted."""
        return scores

    def token_ids(self) -> mx.array | None:
        """The ids [DV] of the tokens that can be drafted; None for all."""
        return None

    def slot_cost(self, target: Target) -> float:
        """What a drafted token is likely to cost, in plain steps of the target."""
        return weight_bytes(self) / weight_bytes(target.model)

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless the target is its own."""
        raise NotImplementedError

    def start(self, target: Target, sampler: Sampler | None = None) -> FeatureSession:
        """Begin one request over `target`; without a sampler it drafts greedily.

        Raises `IncompatibleDrafterError`.
        """
        self.check_fits(target)
        return StepwiseSession(self, target, sampler or Sampler())


class ChainSession(SupportsSharing, SupportsTrees):
    """Drafts a request's chains token by token, and trees around them.

    A tree's slots have the candidates that the network sees after the favourites before them, as in
    DSpark: a tree needs no more passes than a chain.
    """

    _sampler: Sampler

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft a chain of at most `width` rows; nothing waits for the device."""
        if width == 1 or not self.position:
            return Proposal([anchor])
        tokens, _ = self._draft(anchor, width)
        return Proposal(mx.concatenate([mx.array([anchor]), tokens]))

    def propose_tree(self, anchor: int, rows: int, width: int) -> DraftTree:
        """Draft a tree of at most `rows` rows, 2 or more, from a chain of `width`; this waits."""
        _, scores = self._draft(anchor, width)
        ids = self._token_ids()
        found = likeliest(scores if ids is None else scores[:, ids], rows - 1, ids)
        return DraftTree(anchor, *read_candidates([found])[0], rows)

    @abstractmethod
    def _draft(self, anchor: int, width: int) -> tuple[mx.array, mx.array]:
        """The tokens [L] int32 and scores [L, V] of a chain."""

    def _token_ids(self) -> mx.array | None:
        """The ids [DV] of the tokens that can be drafted; None for all."""
        return None


class StepwiseSession(FeatureSession, ChainSession):
    """Drafts for one request with a network that reads the target's features."""

    drafter: StepwiseDrafter
    can_trim, lag = False, 1

    def _token_ids(self) -> mx.array | None:
        return self.drafter.token_ids()

    def _draft(self, anchor: int, width: int) -> tuple[mx.array, mx.array]:
        drafter, cache, target = self.drafter, self._cache, self.target
        taps, tokens = self._take_known([anchor])
        mx.async_eval(self._pending[0][0])  # nothing of the draft computes it
        hidden = drafter.advance(drafter.fuse(taps), mx.array([tokens]), cache, target)[:, -1:]
        drafted, scores, own = mx.zeros((0,), mx.int32), list[mx.array](), 1
        try:
            for slot in range(slots := min(width, drafter.block_size) - 1):
                logits = drafter.widen(drafter.logits(hidden, target)[0])
                score, _ = self._sampler.draft_scores(logits, drafted if slot else None)
                token = score.argmax(axis=-1).astype(mx.int32)
                scores.append(score)
                drafted = mx.concatenate([drafted, token])
                if slot + 1 < slots:
                    features, own = drafter.feedback(hidden), own + drafter.drafts_add_rows
                    hidden = drafter.advance(features, token[None], cache, target)
        finally:  # a processor may fail
            for layer in cache:
                caches.trim(layer, own)
        return drafted, mx.concatenate(scores)

    def _add_pending(self) -> None:
        taps, tokens = self._take_known([])
        following = mx.array([tokens], mx.int32)
        self.drafter.advance(self.drafter.fuse(taps), following, self._cache, self.target)

    def _take_known(self, anchor: list[int]) -> tuple[mx.array, list[int]]:
        """The taps [1, S, K*D] of tokens whose next one is known, and these next tokens.

        With the anchor they are all that wait, without it all but the newest. The newest waits on.
        """
        count = self.pending_features - 1
        tokens, self._next = [*self._next[:count], *anchor], self._next[count:]
        taps = self._take()
        self._pending, self.pending_features = [(taps[:, count:], [0])], 1
        return taps[:, : len(tokens)], tokens
