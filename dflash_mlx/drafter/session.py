"""One request's drafting state: the context cache, and features that have not entered it yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from ..proposal import Proposal
from ..targets.caches import Arrays, strip_prefix
from ..targets.taps import gathered
from .context import ContextCache, ContextCheckpoint
from .protocol import DraftSession
from .tree import DraftTree

if TYPE_CHECKING:
    from ..sampling import Sampler
    from ..targets import Target
    from .calibration import Calibration
    from .candidates import Candidates
    from .config import DraftConfig

Waiting = tuple[mx.array, Sequence[int]]  # features [1, N, K*D], and which of their rows
DraftCheckpoint = tuple[list[ContextCheckpoint], list[Waiting]]
MOST_WAITING = 256  # rows of features that wait for a block: one by one they would cost more


class Network(Protocol):
    """What a session asks of the network it drafts with; `DFlash` says what each part does."""

    @property
    def config(self) -> DraftConfig: ...

    def make_cache(self) -> list[ContextCache]: ...

    def embed_block(self, block: mx.array, target: Target) -> mx.array: ...

    def extend(self, taps: mx.array, cache: list[ContextCache]) -> None: ...

    def __call__(
        self, block_embeddings: mx.array, taps: mx.array, cache: list[ContextCache]
    ) -> mx.array: ...

    def draft(
        self, hidden: mx.array, anchor: mx.array, target: Target, sampler: Sampler
    ) -> mx.array: ...

    def candidates(
        self,
        hidden: mx.array,
        anchor: mx.array,
        target: Target,
        sampler: Sampler,
        calibration: Calibration,
        count: int,
    ) -> Candidates: ...


@runtime_checkable
class Confident(Protocol):
    """A network that can say how likely its drafts are right; `DSpark` says what each part does."""

    @property
    def says_confidence(self) -> bool: ...

    def confidence(self, hidden: mx.array, previous: mx.array) -> mx.array: ...


class Part(NamedTuple):
    """One request's part of a pass of the network.

    Attributes:
        anchor: the last committed token.
        block: [B] token ids, the anchor and masks.
        taps: [1, S, K*D], features that enter the context first.
        cache: the context, of each layer.
        sampler: the request's.
    """

    anchor: int
    block: mx.array
    taps: mx.array
    cache: list[ContextCache]
    sampler: Sampler


class NetworkSession(DraftSession):
    """Drafts chains and trees for one request with a network over its target.

    The newest features wait until the next block, so that their keys and values are computed in
    the same products as the block's own.

    Attributes:
        unread: how many of them wait.
    """

    resumable = storable = True
    unread = 0

    def __init__(self, drafter: Network, target: Target, sampler: Sampler) -> None:
        self._drafter, self._target, self._sampler = drafter, target, sampler
        self._cache = drafter.make_cache()
        self._windows = [layer for layer in self._cache if layer.window is not None]
        self._confident: Confident | None = None
        if isinstance(drafter, Confident) and drafter.says_confidence:
            self._confident, self.has_confidence = drafter, True
        self._pending: list[Waiting] = []

    def resume(self, sampler: Sampler) -> None:
        """Go on with another request over the same text, whose settings and seed are these."""
        self._sampler = sampler

    @property
    def position(self) -> int:
        """Tokens whose features were taken in."""
        return self._cache[0].offset + self.unread

    @property
    def can_trim(self) -> bool:
        """Whether `trim_to` can go back to any position; else only `rewind`."""
        return all(layer.window is None for layer in self._cache)

    def trim_to(self, position: int) -> None:
        """Forget the features of all tokens from a position on."""
        waiting = self._take_pending()[:, : max(0, position - self._cache[0].offset)]
        for layer in self._cache:
            layer.trim_to(min(position, layer.offset))
        self._wait(waiting, range(waiting.shape[1]))
        self._start_computing()

    def checkpoint(self) -> DraftCheckpoint:
        """This state, to come back to; nothing is copied."""
        return [layer.checkpoint() for layer in self._cache], list(self._pending)

    def rewind(self, checkpoint: DraftCheckpoint) -> None:
        """Forget the features since the checkpoint."""
        states, pending = checkpoint
        for layer, state in zip(self._cache, states, strict=True):
            layer.rewind(state)
        self._take_pending()
        for waiting in pending:
            self._wait(*waiting)

    def rows(self, start: int, end: int) -> Arrays:
        """Keys and values [1, KV, S, head_dim] of S tokens in the layers without a window."""
        self._take_in(end)
        return {
            f"{at}.{name}": x
            for at, layer in enumerate(self._cache)
            for name, x in layer.rows(start, end).items()
        }

    def state(self) -> Arrays:
        """The windows of the others."""
        self._take_in(self.position)
        return {
            f"{at}.{name}": x
            for at, layer in enumerate(self._cache)
            for name, x in layer.recent().items()
        }

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Begin with `position` tokens that other sessions have taken in; see `Storable`."""
        for at, layer in enumerate(self._cache):
            pieces = [strip_prefix(piece, f"{at}.") for piece in rows]
            layer.restore(position, pieces, strip_prefix(state, f"{at}."), room)
        self._start_computing()

    def _take_in(self, position: int) -> None:
        """Have no features wait of the tokens before a position."""
        if self._cache[0].offset < position:
            self._drafter.extend(self._take_pending(), self._cache)
            self._start_computing()

    def extend(self, taps: mx.array) -> None:
        """Take in the features [1, S, K*D] of S newly committed tokens, in order."""
        self._make_room()
        self._wait(taps, range(taps.shape[1]))
        self._start_computing()

    def extend_rows(self, taps: mx.array, kept: Sequence[int]) -> None:
        """Take in some rows of a round's features, which are computed; see `Gathers`.

        They are taken out where they are used, in the next draft's own graph.
        """
        full = self._make_room()
        self._wait(taps, kept)
        if full or self._windows:  # a window is cut anew by every draft
            self._start_computing()

    def _make_room(self) -> bool:
        """Have no more features wait than should; whether there were more.

        A further chunk of the prompt, or many rounds that drafted nothing. Evaluating now lets the
        features go: a long prompt's never lie in memory together.
        """
        full = self.unread >= MOST_WAITING
        if full:
            self._drafter.extend(self._take_pending(), self._cache)
        return full

    def _wait(self, taps: mx.array, kept: Sequence[int]) -> None:
        if kept:
            self._pending.append((taps, kept))
            self.unread += len(kept)

    def _start_computing(self) -> None:
        """Leave nothing lazy: the next round may be another thread's."""
        newest = [taps for taps, _ in self._pending[-1:]]
        mx.async_eval(newest, [layer.state for layer in self._cache])

    def _take_pending(self) -> mx.array:
        """The features that wait, [1, S, K*D]; S may be 0."""
        config, pending = self._drafter.config, self._pending
        self._pending, self.unread = [], 0
        if not pending:
            return mx.zeros((1, 0, len(config.target_layer_ids) * config.target_hidden_size))
        if len(pending) == 1:
            return gathered(*pending[0])
        return mx.concatenate([gathered(*waiting) for waiting in pending], axis=1)

    def propose(self, anchor: int, width: int) -> Proposal:
        """Draft a chain of at most `width` rows, the anchor first; nothing waits for the device."""
        if width == 1:
            return Proposal([anchor])
        part = self.part(anchor, width)
        hidden = self._hidden(part)
        drafts = self._drafter.draft(hidden, mx.array(anchor), self._target, self._sampler)
        return self.chain(part, hidden, drafts)

    def chain(self, part: Part, hidden: mx.array, drafts: mx.array) -> Proposal:
        """The proposal of tokens [L] that were drafted in slots with hidden states [1, L, D]."""
        tokens = mx.concatenate([mx.array([part.anchor]), drafts.astype(part.block.dtype)])
        if self._confident is not None:
            self._last = hidden, tokens
        return Proposal(tokens)

    def confidence(self) -> mx.array | None:
        """Logits [L] of the last chain's slots being right, if the network has a confidence head.

        On the device: nothing waits.
        """
        if self._confident is None:
            return None
        hidden, tokens = self._last
        return self._confident.confidence(hidden[0], tokens[:-1])

    def propose_tree(
        self, anchor: int, rows: int, width: int, calibration: Calibration
    ) -> DraftTree:
        """Draft a tree from a block of `width` rows; this waits for the drafter.

        Args:
            anchor: the last committed token.
            rows: the most rows of the tree, the anchor included; 2 or more.
            width: the most rows of a path of it, the anchor included; 2 or more.
            calibration: what is known about the drafter's probabilities.
        """
        part = self.part(anchor, width)
        hidden, last = self._hidden(part), mx.array(anchor)
        candidates = self._drafter.candidates(
            hidden, last, self._target, self._sampler, calibration, rows - 1
        )
        return DraftTree(anchor, candidates, calibration, rows)

    def part(self, anchor: int, width: int) -> Part:
        """This request's part of a pass over a block for `width` rows of a draft, 2 or more.

        It takes the features that waited: the pass has to follow.
        """
        config = self._drafter.config
        rows = min(width - 1, config.drafts) + config.first_row
        block = mx.array([anchor, *[config.mask_token_id] * (rows - 1)])
        return Part(anchor, block, self._take_pending(), self._cache, self._sampler)

    @property
    def pair(self) -> tuple[Network, Target]:
        """The network that drafts, and the target it drafts for."""
        return self._drafter, self._target

    def _hidden(self, part: Part) -> mx.array:
        """The hidden states [1, L, D] of a block's rows that draft.

        Where the anchor's row predicts nothing, neither the head nor a selector sees it.
        """
        embeddings = self._drafter.embed_block(part.block, self._target)
        hidden = self._drafter(embeddings, part.taps, part.cache)
        return hidden[:, self._drafter.config.first_row :]
