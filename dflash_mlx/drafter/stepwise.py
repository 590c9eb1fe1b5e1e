"""Drafting token by token: each slot's input is the token before it and the network's last state.

EAGLE-3 heads and heads for multi-token prediction pair the features of a token with the embedding
of the *next* token. So the newest features wait until that token is known, and a draft begins with
them and the anchor. Its further rows are made from the network's own outputs. They leave the cache
after the draft, even if the target accepts their tokens: kept rows come from the target's features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kernels.shapes import weight_bytes
from ..sampling import Sampler
from .candidates import DraftScores
from .network_session import FeatureSession, NetworkDrafter, NetworkSession

if TYPE_CHECKING:
    from ..targets import Target

# A draft has at most this many rows, because each row costs another pass.
BLOCK_SIZE = 8


class StepwiseDrafter(NetworkDrafter):
    """A network that drafts one token at a time; mixed into an MLX module.

    Attributes:
        drafts_add_rows: whether drafted rows enter its caches.
    """

    feature_shift = 1
    drafts_add_rows = True

    @property
    def block_size(self) -> int:
        """The most rows of a draft, the anchor included."""
        return BLOCK_SIZE

    def fuse(self, taps: mx.array) -> mx.array:
        """Features [1, S, D] from the concatenated taps [1, S, K*Dt]; unchanged by default."""
        return taps

    def advance(
        self, features: mx.array, tokens: mx.array, cache: list[Any], target: Target
    ) -> mx.array:
        """Compute the hidden states [1, S, D] of S rows, which the cache keeps.

        Each row pairs the features of a token, from `features` [1, S, D], with the token after it,
        from `tokens` [1, S].
        """
        raise NotImplementedError

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Logits [1, S, DV] of hidden states [1, S, D], for the tokens that can be drafted."""
        raise NotImplementedError

    def feedback(self, hidden: mx.array) -> mx.array:
        """The features [1, S, D] of the next rows; by default the hidden states [1, S, D]."""
        return hidden

    def slot_cost(self, target: Target) -> float:
        """What a drafted token is likely to cost, in plain steps of the target."""
        return weight_bytes(self) / weight_bytes(target.model)

    def start(self, target: Target, sampler: Sampler | None = None) -> NetworkSession:
        """Begin one request over `target`. Raises `IncompatibleDrafterError`."""
        self.check_fits(target)
        return StepwiseSession(self, target, sampler or Sampler())


class StepwiseSession(FeatureSession):
    """Drafts token by token for one request with a network that reads the target's features."""

    drafter: StepwiseDrafter

    def draft(self, anchor: int, width: int) -> DraftScores:
        """Score the slots of a draft of at most `width` rows, one pass per slot."""
        network = self.drafter
        hidden = self._advance(anchor)[:, -1:]
        drafted_rows = 1

        def logits(token: mx.array | None) -> mx.array:
            nonlocal hidden, drafted_rows
            if token is not None:
                drafted_rows += network.drafts_add_rows
                features = network.feedback(hidden)
                hidden = network.advance(
                    features, token[None], cache=self.cache, target=self.target
                )
            return network.to_full_vocab(network.logits(hidden, self.target)[0])

        try:
            slots = min(width, network.block_size) - 1
            return draft_chain(self.sampler, anchor, slots=slots, logits_after=logits)
        finally:  # a processor may fail
            for layer in self.cache:
                layer.trim(drafted_rows)
            if len(self.cache) > 1:
                # No token depends on an indexer's rows that are all picked. Left lazy, they would
                # belong to this thread, and another one may take the next step.
                self._compute_cache()

    def _read(self) -> None:
        self._advance(None)

    def _advance(self, anchor: int | None) -> mx.array:
        """Read the waiting features; without an anchor, all but the newest."""
        taps, tokens = self.pop_features(anchor)
        network = self.drafter
        return network.advance(
            network.fuse(taps),
            mx.array([tokens], mx.int32),
            cache=self.cache,
            target=self.target,
        )


def draft_chain(
    sampler: Sampler,
    anchor: int,
    *,
    slots: int,
    logits_after: Callable[[mx.array | None], mx.array],
) -> DraftScores:
    """Draft tokens one after the other.

    Args:
        sampler: the sampler of the request.
        anchor: the token before the first slot.
        slots: how many tokens to draft.
        logits_after: returns the logits [1, V] after a token [1]; None stands for the anchor.
    """
    tokens: list[mx.array] = []
    scores: list[mx.array] = []
    for _ in range(slots):
        before = mx.concatenate(tokens) if tokens else None
        logits = logits_after(tokens[-1] if tokens else None)
        slot_scores, _ = sampler.draft_scores(logits, before)
        tokens.append(slot_scores.argmax(axis=-1).astype(mx.int32))
        scores.append(slot_scores)
    return DraftScores(
        mx.concatenate(scores),
        weight=1.0,
        hidden=mx.zeros((slots, 0)),
        anchor=anchor,
        tokens=mx.concatenate(tokens),
    )
