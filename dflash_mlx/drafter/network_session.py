"""The drafting session of a network: its cache, and the features that wait for the next draft.

The newest features wait so that their rows are computed in the same matrix products as the draft.
A network is a function of arrays. The session decides the order: it passes the waiting features to
the network, applies the settings and the noise of the request, and has tokens chosen.
`dflash.BlockSession` drafts a block in one pass, `stepwise.StepwiseSession` drafts token by token.
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
from .candidates import CandidateTokens, DraftScores, read_candidates, top_tokens
from .draft_tree import DraftTree
from .protocol import SupportsSharing, SupportsTrees

if TYPE_CHECKING:
    from ..targets import Target

PendingFeatures = tuple[mx.array, Sequence[int]]  # [1, N, K*D], and which of their rows
# A draft should read no more features than this, from no more forwards than this.
MAX_UNREAD = 256
# No more features than this may wait. It is enough for most prompts, so that the first token need
# not wait for the drafter.
MAX_WAITING_FEATURES = 4096


class NetworkDrafter:
    """A network that drafts; mixed into an MLX module.

    Attributes:
        tap_layers, block_size, drafts_trees: `protocol` describes them.
        feature_shift: 1 if a cache row pairs token i's features with token i+1 (EAGLE-3, MTP), so
            the newest features wait for the next token; else 0.
        reads_newest: whether each draft uses the newest features of the text, even if they have
            been read before.
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
        """Make empty caches, one per layer that keeps rows."""
        raise NotImplementedError

    def to_full_vocab(self, scores: mx.array) -> mx.array:
        """Scores [L, DV] as scores [L, V]; here all tokens can be drafted."""
        return scores

    def choose(self, requests: Sequence[DraftScores]) -> list[mx.array]:
        """Choose the drafted tokens [L] of every request, without waiting for the device."""
        return [
            draft.scores.argmax(axis=-1) if draft.tokens is None else draft.tokens
            for draft in requests
        ]

    def candidates(self, draft: DraftScores, count: int) -> CandidateTokens:
        """Choose the most probable `count` tokens of every slot, without waiting for the device.

        A token-by-token network scores each position after its top-1 prefix, so a tree costs no
        more passes than a chain.
        """
        return top_tokens(draft.scores, count)

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless the drafter was made for this target."""
        raise NotImplementedError

    def start(self, target: Target, sampler: Sampler | None = None) -> NetworkSession:
        """Begin one request over `target`; without a sampler it drafts greedily.

        Raises `IncompatibleDrafterError`.
        """
        raise NotImplementedError


class NetworkSession(SupportsSharing, SupportsTrees):
    """Drafts chains and trees for one request from the scores of a network.

    Attributes:
        drafter: the network.
        sampler: the sampler of the request.
    """

    drafter: NetworkDrafter
    sampler: Sampler

    @abstractmethod
    def draft(self, anchor: int, width: int) -> DraftScores:
        """Score the slots of a draft of at most `width` rows, 2 or more."""

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft a chain of at most `width` rows, without waiting for the device."""
        if width == 1 or self.position < self.drafter.feature_shift:
            return Proposal([anchor])
        return build_chains(self.drafter, [self.draft(anchor, width)])[0]

    def propose_tree(self, anchor: int, rows: int, width: int) -> DraftTree:
        """Draft a tree of at most `rows` rows, 2 or more, in paths of `width`; this waits."""
        return build_trees(self.drafter, [self.draft(anchor, width)], [rows])[0]

    @abstractmethod
    def _read_pending(self) -> None:
        """Read the waiting features without drafting."""

    def _make_room(self, forwards: int, features: int) -> None:
        """Read the waiting features if there would be too many of them, or of their forwards."""
        if forwards >= MAX_UNREAD or features >= MAX_WAITING_FEATURES:
            self._read_pending()

    def catch_up(self) -> None:
        """Read the waiting features if they are too many to be read with the next draft."""
        if self.pending_features > MAX_UNREAD:
            self._read_pending()

    def resume(self, sampler: Sampler) -> None:
        """Continue with another request over the same text, with its settings and seed."""
        self.sampler = sampler


def build_chains(drafter: NetworkDrafter, requests: Sequence[DraftScores]) -> list[Proposal]:
    """Build the chains of requests that drafted together, without waiting for the device."""
    proposals = []
    for draft, tokens in zip(requests, drafter.choose(requests), strict=True):
        anchor = mx.array([draft.anchor], mx.uint32)
        proposals.append(Proposal(mx.concatenate([anchor, tokens.astype(mx.uint32)])))
    return proposals


def build_trees(
    drafter: NetworkDrafter, requests: Sequence[DraftScores], rows: Sequence[int]
) -> list[DraftTree]:
    """Build the trees of requests that drafted together, and wait once for the device.

    `rows` holds the maximum number of rows of each tree.
    """
    candidates = [
        drafter.candidates(draft, row_count - 1)
        for draft, row_count in zip(requests, rows, strict=True)
    ]
    tables = read_candidates(candidates)
    return [
        DraftTree(draft.anchor, tokens=tokens, log_probs=log_probs, rows=row_count)
        for draft, (tokens, log_probs), row_count in zip(requests, tables, rows, strict=True)
    ]


class FeatureSession(NetworkSession):
    """Drafts for one request with a network that reads the target's features.

    Attributes:
        target: whose embedding and head the network may use.
        cache: from the network's `make_cache`.
        newest: [1, 1, K*D], the newest features of the text, if the network `reads_newest`.
        can_trim: whether no layer has a sliding window, and nothing lags.
        pending_features: how many features wait, shifted ones included.
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
        self._next: list[int] = []  # with a feature shift: the tokens after the waiting ones

    @property
    def position(self) -> int:  # type: ignore[override]
        """Tokens whose features were added."""
        return int(self.cache[0].offset) + self.pending_features

    def extend(
        self, taps: mx.array, kept: Sequence[int] | None = None, tokens: Sequence[int] = ()
    ) -> None:
        """Add newly committed tokens. The graph of the next draft gathers their feature rows."""
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
        """Return the waiting features [1, S, K*D] and the tokens after them, and forget both.

        With a feature shift, the newest features keep waiting unless an anchor follows them.
        Without one, the anchor is the only token.
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
        self._pending = [(taps[:, paired:], [0])]  # the newest feature
        self.pending_features = 1
        if anchor is not None:
            mx.async_eval(self._pending[0][0])  # the draft does not compute these
        return taps[:, : len(tokens)], tokens

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        cached = self.cache[0].offset
        features, _ = self.pop_features()
        pending = features[:, : max(0, position - cached)]
        for layer in self.cache:
            layer.trim(max(0, cached - position))
        self.extend(pending)

    def checkpoint(self) -> tuple[Checkpoint, list[PendingFeatures]]:
        """Return the current state. It holds waiting features only if they are shifted."""
        self._read_pending()
        return caches.checkpoint_all(self.cache, self.cache[0].offset), list(self._pending)

    def rewind(self, checkpoint: tuple[Checkpoint, list[PendingFeatures]]) -> None:
        """Go back to the state of a checkpoint."""
        cache_checkpoint, pending = checkpoint
        caches.rewind_all(self.cache, self.cache[0].offset, cache_checkpoint)
        self._pending = list(pending)
        self.pending_features = len(pending)  # at most one feature waits in a checkpoint
        self._next = []

    def rows(self, start: int, end: int) -> Arrays:
        """The cache rows that these tokens complete, in the layers without a window."""
        first = max(0, start - self._feature_shift)
        last = end - self._feature_shift
        if self.cache[0].offset < last:
            self._read_pending()
        return caches.rows_of_all(self.cache, first, last) if last > first else {}

    def state(self) -> Arrays:
        """The windows of the other layers, and the shifted features [1, 1, K*D], if any."""
        self._read_pending()
        features: Arrays = {}
        if self._pending:
            taps, kept = self._pending[0]
            features = {"features": gathered(taps, kept)}
        return caches.state_of_all(self.cache) | features

    def dry_run(self, taps: mx.array) -> None:
        """Extend the session without computing anything: only shapes count."""
        self.extend(taps, tokens=[0] * taps.shape[1])
        self._read()

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Start with `position` tokens from stored rows and state, as in `SupportsSharing`."""
        cached = position - self._feature_shift
        if cached:
            caches.restore_all(self.cache, cached, rows=rows, state=state, room=room)
        if self._feature_shift:
            self.extend(state["features"])
        self.start_computing()

    def _read_pending(self) -> None:
        if self.pending_features > self._feature_shift:
            self._read()
            self.start_computing()

    @abstractmethod
    def _read(self) -> None:
        """Add rows to the cache for all waiting features but shifted ones, lazily."""

    def start_computing(self) -> None:
        """Start to compute the waiting features, because another thread may draft with them."""
        mx.async_eval([taps for taps, _ in self._pending])
        self._compute_cache()

    def _compute_cache(self) -> None:
        mx.async_eval([layer.arrays() for layer in self.cache if layer.offset])
