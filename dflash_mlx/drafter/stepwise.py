"""Drafting token by token: each slot's input is the token before it and the network's own state.

EAGLE-3 heads and heads for multi-token prediction pair the features of a token with the embedding
of the *next* token. So the newest features wait until that token is known, and a draft begins with
them and the anchor. Its further rows are made of the network's own outputs. They leave the cache
after the draft, even if the target accepts their tokens: kept rows come from the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..kernels.shapes import weight_bytes
from ..proposal import Proposal
from ..sampling import Sampler
from ..targets import caches
from ..targets.caches import Arrays
from ..targets.taps import gathered
from .candidates import likeliest, read_candidates
from .protocol import DraftSession
from .tree import DraftTree

if TYPE_CHECKING:
    from ..targets import Target

BLOCK_SIZE = 8  # the most rows of a draft, which costs more with each
MOST_PENDING = 256  # features or tokens that wait for a draft


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

    def start(self, target: Target, sampler: Sampler | None = None) -> StepwiseSession:
        """Begin one request over `target`; without a sampler it drafts greedily.

        Raises `IncompatibleDrafterError`.
        """
        self.check_fits(target)
        return StepwiseSession(self, target, sampler or Sampler())


class ChainSession(DraftSession):
    """Drafts a request's chains token by token, and trees around them.

    A tree's slots have the candidates that the network sees after the favourites before them, as in
    DSpark: a tree needs no more passes than a chain.
    """

    resumable = storable = True
    position = 0
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

    def resume(self, sampler: Sampler) -> None:
        """Continue with another request over the same text, with its settings and seed."""
        self._sampler = sampler

    def _draft(self, anchor: int, width: int) -> tuple[mx.array, mx.array]:
        """The tokens [L] int32 and scores [L, V] of a chain."""
        raise NotImplementedError

    def _token_ids(self) -> mx.array | None:
        """The ids [DV] of the tokens that can be drafted; None for all."""
        return None


class StepwiseSession(ChainSession):
    """Drafts for one request with a network that reads the target's features.

    Attributes:
        position: tokens whose features were added.
        can_trim: False, for the newest features belong to one position only.
    """

    can_trim = False

    def __init__(self, drafter: StepwiseDrafter, target: Target, sampler: Sampler) -> None:
        self.drafter, self.target, self._sampler = drafter, target, sampler
        self._cache = drafter.make_cache()
        self._rows = 0  # of the cache; row i has the features of token i and token i + 1
        # The features of the tokens from `_rows` on, and the tokens after each but the newest.
        self._features: list[tuple[mx.array, Sequence[int]]] = []
        self._next: list[int] = []
        self._read = 0  # tokens that `read_tokens` got

    @property
    def pending_features(self) -> int:
        """How many features wait for a draft: the newest one always."""
        return self.position - self._rows

    def read_tokens(self, tokens: Sequence[int]) -> None:
        """Add newly committed tokens; those that the cache's rows have are passed over."""
        self._next += tokens[max(0, self._rows + 1 - self._read) :]
        self._read += len(tokens)

    def extend_rows(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Add some rows of a forward's features, which are being computed."""
        if self.pending_features >= MOST_PENDING:  # a long prompt's are never in memory together
            self._read_pending()
        if kept:
            self._features.append((taps, kept))
            self.position += len(kept)

    def _token_ids(self) -> mx.array | None:
        return self.drafter.token_ids()

    def _draft(self, anchor: int, width: int) -> tuple[mx.array, mx.array]:
        drafter, cache, target = self.drafter, self._cache, self.target
        taps, tokens = self._take_pending([anchor])
        mx.async_eval(self._features[0][0])  # nothing of the draft computes it
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

    def _take_pending(self, following: list[int]) -> tuple[mx.array, list[int]]:
        """The taps [1, S, K*D] that wait and have a next token, and these tokens.

        `following` is the token after the newest ones, or nothing: they wait on in any case.
        """
        pieces, rows = [gathered(*each) for each in self._features], self.pending_features - 1
        taps = mx.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]
        tokens, self._next = [*self._next[:rows], *following], self._next[rows:]
        self._features, self._rows = [(taps[:, rows:], [0])], self._rows + rows
        return taps[:, : len(tokens)], tokens

    def _advance_pending(self) -> None:
        """Add rows to the cache for all features but the newest; lazy."""
        taps, tokens = self._take_pending([])
        following = mx.array([tokens], mx.int32)
        self.drafter.advance(self.drafter.fuse(taps), following, self._cache, self.target)

    def _read_pending(self) -> None:
        if self.pending_features > 1:
            self._advance_pending()
            self._start_computing()

    def _start_computing(self) -> None:
        """Leave nothing lazy behind: the next step may run in another thread."""
        mx.async_eval(self._features[0][0])
        if self._rows:
            mx.async_eval([caches.arrays(layer) for layer in self._cache])

    def checkpoint(self) -> tuple[int, list[tuple[mx.array, Sequence[int]]]]:
        """The position and the newest features; nothing is copied."""
        self._read_pending()
        return self.position, list(self._features)

    def rewind(self, checkpoint: tuple[int, list[tuple[mx.array, Sequence[int]]]]) -> None:
        """Go back to a checkpoint."""
        rows = max(0, checkpoint[0] - 1)
        for layer in self._cache:
            caches.trim(layer, self._rows - rows)
        self.position, self._features = checkpoint[0], list(checkpoint[1])
        self._rows, self._read, self._next = rows, self.position, []

    def rows(self, start: int, end: int) -> Arrays:
        """The cache's rows that end with the tokens from `start` to `end`; token 0 has none."""
        self._read_pending()
        return caches.rows_of_all(self._cache, max(0, start - 1), end - 1)

    def state(self) -> Arrays:
        """The newest features [1, 1, K*D]."""
        self._read_pending()
        return {"features": gathered(*self._features[0])} if self._features else {}

    def dry_run(self, taps: mx.array) -> None:
        """See `DraftSession`."""
        self.read_tokens([0] * taps.shape[1])
        self._features, self.position = [(taps, range(taps.shape[1]))], taps.shape[1]
        self._advance_pending()

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Start with `position` tokens that other sessions have read."""
        caches.restore_all(self._cache, position - 1, rows, {}, room)
        self.position, self._rows = position, position - 1
        self._features = [(state["features"], [0])]
        self._start_computing()
