"""The session of a network of ours: a cache, and features that wait for the next draft.

The newest features wait, so that their rows are computed in the same products as the draft's own.
A network is a function of arrays. The session holds the order: what waits, the network's pass, the
noise and the settings of the request, and the choice. `dflash.BlockSession` drafts a block in one
pass, `stepwise.StepwiseSession` token by token.
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
from .candidates import CandidateTokens, DraftScores, likeliest, read_candidates
from .draft_tree import DraftTree
from .protocol import SupportsSharing, SupportsTrees

if TYPE_CHECKING:
    from ..targets import Target

PendingFeatures = tuple[mx.array, Sequence[int]]  # [1, N, K*D], and which of their rows
MOST_UNREAD = 256  # features that a draft should read, and forwards whose features may wait for it
MOST_FEATURES = 4096  # that may wait: a prompt's, so that the first token need not wait for them


class NetworkDrafter:
    """A network that drafts; mixed into an MLX module.

    Attributes:
        tap_layers, block_size, drafts_trees: see `protocol`.
        lag: 1 if a row of its cache has the features of a token and the token after it, else 0.
        reads_newest: whether it drafts with the newest features of the text, waiting or not.
    """

    tap_layers: Any
    block_size: Any
    drafts_trees = True
    feature_shift = 0
    reads_newest = False

    def __repr__(self) -> str:
        """One line, not MLX's tree of all layers."""
        shown = f"block_size={self.block_size}, tap_layers={self.tap_layers}"
        return f"{type(self).__name__}({shown})"

    def make_cache(self) -> list[Any]:
        """Empty caches of mlx-lm's kinds, one per layer that keeps rows."""
        raise NotImplementedError

    def to_full_vocab(self, scores: mx.array) -> mx.array:
        """Scores [L, DV] as scores [L, V]; here all tokens can be drafted."""
        return scores

    def choose(self, requests: Sequence[DraftScores]) -> list[mx.array]:
        """The drafted tokens [L] of every request; nothing waits."""
        return [
            slots.scores.argmax(axis=-1) if slots.tokens is None else slots.tokens
            for slots in requests
        ]

    def candidates(self, slots: DraftScores, count: int) -> CandidateTokens:
        """The likeliest `count` tokens of every slot; nothing waits.

        Those of a network that drafts token by token are what it sees after the favourites before
        them: a tree needs no more passes than a chain.
        """
        return likeliest(slots.scores, count)

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless the target is its own."""
        raise NotImplementedError

    def start(self, target: Target, sampler: Sampler | None = None) -> NetworkSession:
        """Begin one request over `target`; without a sampler it drafts greedily.

        Raises `IncompatibleDrafterError`.
        """
        raise NotImplementedError


class NetworkSession(SupportsSharing, SupportsTrees):
    """Drafts chains and trees for one request from the slots of a network's drafts.

    Attributes:
        drafter: the network.
        sampler: of the request.
    """

    drafter: NetworkDrafter
    sampler: Sampler

    @abstractmethod
    def draft(self, anchor: int, width: int) -> DraftScores:
        """The slots of a draft of at most `width` rows, 2 or more."""

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft a chain of at most `width` rows; nothing waits for the device."""
        if width == 1 or self.position < self.drafter.feature_shift:
            return Proposal([anchor])
        return build_chains(self.drafter, [self.draft(anchor, width)])[0]

    def propose_tree(self, anchor: int, rows: int, width: int) -> DraftTree:
        """Draft a tree of at most `rows` rows, 2 or more, in paths of `width`; this waits."""
        return build_trees(self.drafter, [self.draft(anchor, width)], [rows])[0]

    @abstractmethod
    def _read_pending(self) -> None:
        """Read what waits, without drafting."""

    def _make_room(self, forwards: int, features: int) -> None:
        """Read what waits if so many features, of so many forwards before, would be too many."""
        if forwards >= MOST_UNREAD or features >= MOST_FEATURES:
            self._read_pending()

    def catch_up(self) -> None:
        """See `DraftSession`."""
        if self.pending_features > MOST_UNREAD:
            self._read_pending()

    def resume(self, sampler: Sampler) -> None:
        """See `SupportsResume`."""
        self.sampler = sampler


def build_chains(drafter: NetworkDrafter, requests: Sequence[DraftScores]) -> list[Proposal]:
    """The chains of requests that drafted together; nothing waits for the device."""
    chains = zip(requests, drafter.choose(requests), strict=True)
    return [
        Proposal(mx.concatenate([mx.array([slots.anchor], mx.uint32), tokens.astype(mx.uint32)]))
        for slots, tokens in chains
    ]


def build_trees(
    drafter: NetworkDrafter, requests: Sequence[DraftScores], rows: Sequence[int]
) -> list[DraftTree]:
    """The trees, of at most `rows` rows each, of requests that drafted together; waits once."""
    pairs = zip(requests, rows, strict=True)
    tables = read_candidates([drafter.candidates(slots, count - 1) for slots, count in pairs])
    return [
        DraftTree(slots.anchor, tokens, log_probs, count)
        for slots, (tokens, log_probs), count in zip(requests, tables, rows, strict=True)
    ]


class FeatureSession(NetworkSession):
    """Drafts for one request with a network that reads the target's features.

    Attributes:
        target: whose embedding and head the network may use.
        cache: from the network's `make_cache`.
        newest: [1, 1, K*D], the newest features of the text, if the network `reads_newest`.
        can_trim: whether no layer has a sliding window, and nothing lags.
        pending_features: how many features wait; those that lag always do.
    """

    newest: mx.array | None = None

    def __init__(self, drafter: NetworkDrafter, target: Target, sampler: Sampler) -> None:
        self.drafter = drafter
        self.target = target
        self.sampler = sampler
        self.cache = drafter.make_cache()
        self._feature_shift = drafter.feature_shift
        self.can_trim = not self._feature_shift and all(cache.can_trim for cache in self.cache)
        self._pending: list[PendingFeatures] = []
        self._next: list[int] = []  # where features lag: the tokens after those that wait

    @property
    def position(self) -> int:  # type: ignore[override]
        """Tokens whose features were added."""
        return int(self.cache[0].offset) + self.pending_features

    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """See `DraftSession`. The next draft gathers the rows in its own graph."""
        kept = range(taps.shape[1]) if kept is None else kept
        self._make_room(len(self._pending), self.pending_features + len(kept))
        if self._feature_shift:
            self._next += tokens if self.position else tokens[1:]
        if kept:
            self._pending.append((taps, kept))
            self.pending_features += len(kept)
        if not (self._feature_shift or self.can_trim):  # every draft makes a new array of a window
            self._compute_cache()

    def pop_features(self, anchor: int | None = None) -> tuple[mx.array, list[int]]:
        """The features [1, S, K*D] that wait, and the tokens after them; they wait no more.

        Where features lag, the newest wait on: they are taken with an anchor only. Else the only
        token is the anchor.
        """
        pieces = [gathered(taps, kept) for taps, kept in self._pending]
        paired = self.pending_features - self._feature_shift  # features whose next token is known
        tokens = [] if anchor is None else [anchor]
        self._pending = []
        self.pending_features = 0
        if not pieces:
            return mx.zeros((1, 0, 0)), tokens
        taps = mx.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]
        if self.drafter.reads_newest:
            self.newest = taps[:, -1:]
        if not self._feature_shift:
            return taps, tokens
        tokens = self._next[:paired] + tokens
        self._next = self._next[paired:]
        self._pending = [(taps[:, paired:], [0])]
        self.pending_features = 1
        if anchor is not None:
            mx.async_eval(self._pending[0][0])  # nothing of the draft computes it
        return taps[:, : len(tokens)], tokens

    def trim_to(self, position: int) -> None:
        """See `SupportsResume`."""
        held = self.cache[0].offset
        pending = self.pop_features()[0][:, : max(0, position - held)]
        for layer in self.cache:
            layer.trim(max(0, held - position))
        self.extend(pending)

    def checkpoint(self) -> tuple[Checkpoint, list[PendingFeatures]]:
        """See `SupportsResume`; it holds no features but those that lag."""
        self._read_pending()
        return caches.checkpoint_all(self.cache, self.cache[0].offset), list(self._pending)

    def rewind(self, checkpoint: tuple[Checkpoint, list[PendingFeatures]]) -> None:
        """See `SupportsResume`."""
        held, pending = checkpoint
        caches.rewind_all(self.cache, self.cache[0].offset, held)
        self._pending = list(pending)
        self.pending_features = len(pending)
        self._next = []

    def rows(self, start: int, end: int) -> Arrays:
        """The cache's rows that these tokens complete, of the layers without a window."""
        first = max(0, start - self._feature_shift)
        last = end - self._feature_shift
        if self.cache[0].offset < last:
            self._read_pending()
        return caches.rows_of_all(self.cache, first, last) if last > first else {}

    def state(self) -> Arrays:
        """The windows of the other layers, and the features [1, lag, K*D] that lag."""
        self._read_pending()
        lagging = {"features": gathered(*self._pending[0])} if self._pending else {}
        return caches.state_of_all(self.cache) | lagging

    def dry_run(self, taps: mx.array) -> None:
        """See `SupportsSharing`."""
        self.extend(taps, tokens=[0] * taps.shape[1])
        self._read()

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """See `SupportsSharing`."""
        if held := position - self._feature_shift:
            caches.restore_all(self.cache, held, rows, state, room)
        if self._feature_shift:
            self.extend(state["features"])
        self.start_computing()

    def _read_pending(self) -> None:
        if self.pending_features > self._feature_shift:
            self._read()
            self.start_computing()

    @abstractmethod
    def _read(self) -> None:
        """Add rows to the cache for all features that wait, but for those that lag. Lazy."""

    def start_computing(self) -> None:
        """See `DraftSession`."""
        mx.async_eval([taps for taps, _ in self._pending])
        self._compute_cache()

    def _compute_cache(self) -> None:
        mx.async_eval([layer.arrays() for layer in self.cache if layer.offset])
