"""The session of a network that reads the target's features: a cache, and features that wait.

The newest features wait for the next draft: their rows are computed in the same products as the
draft's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..proposal import Proposal
from ..sampling import Sampler
from ..targets import caches
from ..targets.caches import Arrays, Checkpoint
from ..targets.taps import gathered
from .candidates import DraftInput, Slots, read_candidates
from .networks import LILICORR
from .protocol import SupportsBatch, SupportsSharing
from .tree import DraftTree

if TYPE_CHECKING:
    from ..targets import Target

PendingFeatures = tuple[mx.array, Sequence[int]]  # [1, N, K*D], and which of their rows
MOST_PENDING = 256  # features or tokens that wait for a draft


class FeatureSession(SupportsSharing):
    """What sessions over features share. All features but the newest `lag` can enter the cache.

    Attributes:
        drafter, target: as given; the drafter has `make_cache`.
        lag: 0, or 1 if a row has the features of a token and the token after it.
        can_trim: whether no layer has a sliding window, and nothing lags.
        pending_features: how many features wait; those of `lag` always.
    """

    lag = 0

    def __init__(self, drafter: Any, target: Target, sampler: Sampler) -> None:
        self.drafter, self.target, self._sampler = drafter, target, sampler
        self._cache: list[Any] = drafter.make_cache()
        self._pending: list[PendingFeatures] = []
        self._next: list[int] = []  # where features lag: the tokens after those that wait

    @abstractmethod
    def _add_pending(self) -> None:
        """Add rows to the cache for all features that wait but the newest `lag`; lazy."""

    @property
    def position(self) -> int:  # type: ignore[override]
        """Tokens whose features were added."""
        return int(self._cache[0].offset) + self.pending_features

    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """See `DraftSession`. The next draft gathers the rows in its own graph."""
        if self.pending_features >= MOST_PENDING:  # a long prompt's are never in memory together
            self._read_pending()
        kept = range(taps.shape[1]) if kept is None else kept
        if self.lag:
            self._next += tokens if self.position else tokens[1:]
        if kept:
            self._pending.append((taps, kept))
            self.pending_features += len(kept)

    def resume(self, sampler: Sampler) -> None:
        """See `SupportsResume`."""
        self._sampler = sampler

    def trim_to(self, position: int) -> None:
        """See `SupportsResume`."""
        held = self._cache[0].offset
        pending = self._take()[:, : max(0, position - held)]
        for layer in self._cache:
            caches.trim(layer, max(0, held - position))
        self.extend(pending)

    def checkpoint(self) -> tuple[Checkpoint, list[PendingFeatures]]:
        """See `SupportsResume`; it holds no features but those that lag."""
        self._read_pending()
        return caches.checkpoint(self._cache, self._cache[0].offset), list(self._pending)

    def rewind(self, checkpoint: tuple[Checkpoint, list[PendingFeatures]]) -> None:
        """See `SupportsResume`."""
        held, pending = checkpoint
        caches.rewind(self._cache, self._cache[0].offset, held)
        self._pending, self.pending_features, self._next = list(pending), len(pending), []

    def rows(self, start: int, end: int) -> Arrays:
        """The cache's rows that these tokens complete, of the layers without a window."""
        first, last = max(0, start - self.lag), end - self.lag
        if self._cache[0].offset < last:
            self._read_pending()
        return caches.rows_of_all(self._cache, first, last) if last > first else {}

    def state(self) -> Arrays:
        """The windows of the other layers, and the features [1, lag, K*D] that lag."""
        self._read_pending()
        lagging = {"features": gathered(*self._pending[0])} if self._pending else {}
        return caches.state_of_all(self._cache) | lagging

    def dry_run(self, taps: mx.array) -> None:
        """See `SupportsSharing`."""
        self.extend(taps, tokens=[0] * taps.shape[1])
        self._add_pending()

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """See `SupportsSharing`."""
        if held := position - self.lag:
            caches.restore_all(self._cache, held, rows, state, room)
        if self.lag:
            self.extend(state["features"])
        self._start_computing()

    def _read_pending(self) -> None:
        if self.pending_features > self.lag:
            self._add_pending()
            self._start_computing()

    def _start_computing(self) -> None:
        """Leave nothing lazy behind: the next step may run in another thread."""
        if self.lag:
            mx.async_eval([taps for taps, _ in self._pending])
        mx.async_eval([caches.arrays(layer) for layer in self._cache if layer.offset])

    def _take(self) -> mx.array:
        """The features [1, S, K*D] that wait, and wait no more."""
        pieces = [gathered(taps, kept) for taps, kept in self._pending]
        self._pending, self.pending_features = [], 0
        return mx.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]


class BlockSession(FeatureSession, SupportsBatch):
    """Drafts chains and trees for one request from blocks that a network drafts in one pass."""

    def __init__(self, drafter: Any, target: Target, sampler: Sampler) -> None:
        super().__init__(drafter, target, sampler)
        self.can_trim = not any(drafter.config.windows)
        config = drafter.config
        width = len(config.target_layer_ids) * config.target_hidden_size
        self._none = self._newest = mx.zeros((1, 0, width))  # the taps of the newest token read

    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """See `DraftSession`; the tokens are not read."""
        super().extend(taps, kept)
        if not self.can_trim:  # every draft makes a new array of a window
            self._start_computing()

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft a chain of at most `width` rows; nothing waits for the device."""
        if width == 1:
            return Proposal([anchor])
        [tokens] = self.drafter.choose([self._draft(anchor, width)])
        return Proposal(mx.concatenate([mx.array([anchor]), tokens.astype(mx.int32)]))

    def propose_tree(self, anchor: int, rows: int, width: int) -> DraftTree:
        """Draft a tree of at most `rows` rows from a block of `width` rows; this waits."""
        candidates = self.drafter.candidates(self._draft(anchor, width), rows - 1)
        return DraftTree(anchor, *read_candidates([candidates])[0], rows)

    def draft_input(self, anchor: int, width: int) -> DraftInput:
        """See `SupportsBatch`. It takes the features that waited: the network has to run next."""
        config = self.drafter.config
        rows = min(width - 1, config.drafts) + config.first_row
        block = mx.array([anchor, *[config.mask_token_id] * (rows - 1)])
        return DraftInput(block, self._take(), self._cache)

    def score(self, logits: mx.array, hidden: mx.array, anchor: int) -> Slots:
        """See `SupportsBatch`; processors run."""
        scores, weight = self._sampler.draft_scores(self.drafter.widen(logits))
        slots = Slots(scores, weight, hidden, mx.array(anchor))
        return self.drafter.prepare(slots, logits, self._newest, self.target)

    def _draft(self, anchor: int, width: int) -> Slots:
        """Draft positions of a block. The anchor's row is left out if it predicts no draft."""
        given, drafter = self.draft_input(anchor, width), self.drafter
        hidden = drafter(drafter.embed(given.block[None], self.target), given.taps, given.cache)
        hidden = hidden[:, drafter.config.first_row :]
        return self.score(drafter.logits(hidden, self.target)[0], hidden[0], anchor)

    def _add_pending(self) -> None:
        self.drafter.extend(self._take(), self._cache)

    def _take(self) -> mx.array:
        if not self._pending:
            return self._none
        taps = super()._take()
        if self.drafter.config.kind == LILICORR:
            self._newest = taps[:, -1:]
        return taps
