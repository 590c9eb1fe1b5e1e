"""One request's caches of a target, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..memory import SPAN, compute
from ..proposal import Proposal
from . import caches
from .caches import (
    Arrays,
    CacheParts,
    Checkpoint,
    FullCache,
    RecurrentCache,
    WindowCache,
    make_cache,
)
from .model_parts import ModelParts
from .rows import Rows, SharedForward, Verified
from .span import Span
from .traced import TracedSteps, can_trace

PREFILL_STEP = 2048  # tokens per prefill forward, as in mlx-lm
CPU_STEP = 512  # on a CPU, whose attention also computes the pairs that the causal mask drops
LAST_STEP = 64  # most tokens of a prompt's last forward, which computes logits


def longest_step() -> int:
    """The most tokens of a prompt that one forward reads on this device."""
    return CPU_STEP if mx.default_device() == mx.cpu else PREFILL_STEP


class Reader(Protocol):
    """What a session asks of its `Target`."""

    model: nn.Module
    parts: ModelParts
    steps: TracedSteps
    vocab_size: int

    def forward(self, rows: Rows, logits: Literal["all", "last"] = "all") -> Verified:
        """Read rows to verify."""

    def read(self, spans: Sequence[Span]) -> list[tuple[mx.array | None, mx.array]]:
        """Read tokens of prompts."""

    def run_together(
        self, rows: Rows, sharing: SharedForward | None, logits: Literal["all", "last"] = "all"
    ) -> Verified:
        """Read rows in this process only."""


class TargetSession:
    """One request's caches: `Target.forward` adds rows to them, and `commit` keeps some of these.

    Args:
        target: the model.
        tap_layers, kv_bits: as in `Target.start`.

    Attributes:
        tap_layers, kv_bits: as given.
        cache: the caches, a `DraftCache` each; fewer than layers where layers share them.
        position: committed tokens in the caches.
        intact: False while a forward changes the caches, and after one that failed.
        can_pipeline: whether the next forward may start before its token is known. False for caches
            with windows or states, which could not forget that token again.
        can_trace: whether a step can be a function of what the caches hold.
        slot: the `kv_slots.Slot` in which a batch has this request's keys and values.
        longest: the most tokens of a prompt that one forward may read on any device.
    """

    longest = PREFILL_STEP

    def __init__(self, target: Reader, tap_layers: Sequence[int], kv_bits: int | None) -> None:
        self._target = target
        self.tap_layers = tuple(tap_layers)
        self.kv_bits = kv_bits
        self.cache = make_cache(target.model, target.parts.owners, kv_bits)
        # Caches that a forward may leave lazy, for its logits do not depend on all of them: states,
        # and the keys of an indexer that still picks every row.
        self._lazy = [
            cache for cache in self.cache if not cache.can_trim or isinstance(cache, CacheParts)
        ]
        self._windows = [cache for cache in self.cache if isinstance(cache, WindowCache)]
        self._states = [cache for cache in self.cache if isinstance(cache, RecurrentCache)]
        self.can_pipeline = not self._lazy
        self.can_trace = can_trace(self.cache)
        self._rolls_back = all(cache.rolls_back for cache in self.cache)
        self._uncommitted: Proposal | None = None  # what the last forward has read
        # The state before that forward, for caches whose kept rows have to run again.
        self._before: Checkpoint | None = None
        self._read_trees = False
        self.slot: Any = None
        self.position = 0
        self.intact = True
        self._tokens_since_clear = 0  # since MLX returned freed buffers

    def chunk_end(self, end: int, stops: Sequence[int] = (), most: int = PREFILL_STEP) -> int:
        """The position up to which the next forward of a prompt reads.

        The last forward is short, because it alone computes what only logits need, such as the
        last layer's MLP.

        Args:
            end: the end of the prompt.
            stops: positions at which a forward ends.
            most: the most tokens of the forward.
        """
        stops_ahead = (stop for stop in (end - LAST_STEP, *stops, end) if stop > self.position)
        next_stop = min(stops_ahead)
        return min(next_stop, self.position + min(most, longest_step(), self.longest))

    def prefill(self, tokens: Sequence[int]) -> Iterator[tuple[mx.array | None, mx.array]]:
        """Read a prompt, forward by forward; yields what `read` returns."""
        start = self.position
        while unread := tokens[self.position - start :]:
            end = self.chunk_end(start + len(tokens))
            piece = unread[: end - self.position]
            yield self.read(piece, last=len(piece) == len(unread))

    def read(self, tokens: Sequence[int], last: bool) -> tuple[mx.array | None, mx.array]:
        """Read tokens of a prompt in one forward: logits [1, V] and taps [1, S, K*D].

        The logits are those after the last token; None unless these tokens are the prompt's `last`.
        Caches and logits are computed; taps may still be lazy.
        """
        return self._target.read([Span(self, Proposal(tokens), ends_prompt=last)])[0]

    def read_lazily(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Read tokens [S] without waiting: the logits [1, V] after them, and their taps."""
        rows = Rows([Span(self, Proposal(tokens))], is_prompt=True)
        logits, taps = self._target.run_together(rows, None, logits="last")
        self.advance(len(rows))
        return logits, taps

    def start_computing(self) -> None:
        """Leave nothing lazy in the caches: the next forward may be another thread's."""
        compute(caches.arrays_of_all(self.cache), wait=False)

    def verify(self, proposal: Proposal) -> tuple[mx.array, mx.array]:
        """Read a proposal in a forward of its own: logits [N, V] after each row, taps [1, N, K*D].

        Lazy: nothing is evaluated yet. `commit` must follow before the next forward. Raises what
        `Target.forward` raises.
        """
        return self._target.forward(Rows([Span(self, proposal)]))

    def begin(self, span: Span, all_kept: bool) -> None:
        """Prepare the caches for a forward over these rows, which `commit` or `advance` ends.

        Args:
            span: the rows.
            all_kept: whether they are a prompt's, of which `advance` keeps all.
        """
        self.intact = False
        self._uncommitted = span.proposal
        for cache in self._windows:
            if all_kept or self._target.steps.why_not is not None:  # only traced steps need rings
                cache.leave_ring()
            else:
                cache.reserve(len(span))
        if not (all_kept or self._rolls_back or len(span) == 1):
            self._before = self.checkpoint()
        if not span.is_chain:
            self._read_trees = True
            for cache in self.cache:
                cache.begin(span)

    def slot_caches(self, numbers: Sequence[int]) -> list[FullCache]:
        """The caches of these numbers if they can be in a slot; else none.

        Those of a request whose drafts were trees, and quantized ones, stay as they are.
        """
        caches = [self.cache[number] for number in numbers]
        plain = self.position > 0 and all(isinstance(cache, FullCache) for cache in caches)
        return caches if plain and not self._read_trees else []

    def leave_slot(self) -> None:
        """Move the keys and values back to this session's caches, if they can be trusted."""
        slot = self.slot
        self.slot = None
        if slot is not None:
            if self.intact:
                slot.copy_back(self.position)
            slot.array.remove(self)

    def nbytes_after(self, tokens: int, layers: Sequence[int] | None = None) -> int:
        """Bytes of the caches after a prefill of this many tokens, which is not computed.

        `layers` are the numbers of the caches to count; None counts all.
        """
        for start in range(0, tokens, PREFILL_STEP):
            self.dry_run(min(PREFILL_STEP, tokens - start))
        counted = range(len(self.cache)) if layers is None else layers
        leaves = tree_flatten([self.cache[number].arrays() for number in counted])
        return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))

    def dry_run(self, tokens: int) -> mx.array:
        """Read tokens whose forward is never computed, for the shapes and types in the caches.

        Returns their taps. The session is of no other use afterwards.
        """
        return self.read_lazily(mx.zeros(tokens, mx.int32))[1]

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a recurrent state."""
        return bool(self._states)

    @property
    def needs_no_masks(self) -> bool:
        """Whether no layer looks at the rows before it."""
        return len(self._states) == len(self.cache)

    def commit(self, kept: Sequence[int]) -> None:
        """Keep these rows of the last forward (a path from row 0) and remove the others."""
        proposal = self._uncommitted
        assert proposal is not None
        rejected = len(proposal) - len(kept)
        moved = kept[-1] >= len(kept)  # a path with rejected rows in between
        if rejected and self._before is not None:
            self._run_again(proposal, len(kept))
        elif rejected:
            in_slot = () if self.slot is None else self.slot.layers
            for number, cache in enumerate(self.cache):
                if number not in in_slot:  # a slot's rows end at `position`
                    cache.commit(kept, len(proposal))
        self.advance(len(kept))
        # A full cache moves to a buffer with SPAN more rows. Between two calls of `clear_cache` it
        # does so once at most, so MLX holds no more than one of its old buffers.
        self._tokens_since_clear += len(kept)
        if self.slot is None and self._tokens_since_clear >= SPAN - len(proposal):
            mx.clear_cache()
            self._tokens_since_clear = 0
        lazy = self.cache if moved else self._lazy
        if lazy:  # as `start_computing`
            compute(caches.arrays_of_all(lazy), wait=False)

    def advance(self, rows: int) -> None:
        """Count the rows of a forward that the caches have from now on."""
        for cache in self._states:
            cache.release()
        self.position += rows
        self.intact = True
        self._uncommitted = None
        self._before = None

    def _run_again(self, proposal: Proposal, kept: int) -> None:
        """Go back to before the last forward, and run the rows again that are kept.

        For caches whose states have no rollback. Waits, so that the step is timed with it.
        """
        before = self._before
        assert before is not None
        caches.rewind_all(self.cache, self.position + len(proposal), before)
        tokens = proposal.array(self._target.vocab_size)[:kept]
        self._target.run_together(Rows([Span(self, Proposal(tokens))]), None)
        compute(caches.arrays_of_all(self.cache))

    @property
    def can_trim(self) -> bool:
        """Whether `trim_to` can go back to any position; else only `rewind` to a checkpoint."""
        return all(cache.can_trim for cache in self.cache)

    def trim_to(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self.leave_slot()
        for cache in self.cache:
            cache.trim(self.position - position)
        self.position = position

    def checkpoint(self) -> Checkpoint:
        """This state, to `rewind` to. It holds windows and recurrent states by reference."""
        return caches.checkpoint_all(self.cache, self.position)

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Forget all tokens since the checkpoint."""
        self.leave_slot()
        caches.rewind_all(self.cache, self.position, checkpoint)
        self.position = checkpoint.position

    def rows(self, start: int, end: int) -> Arrays:
        """The cached rows of the tokens from `start` to `end`, by name: lazy slices."""
        self.leave_slot()
        return caches.rows_of_all(self.cache, start, end)

    def state(self) -> Arrays:
        """The windows and recurrent states, valid at this position only, by name."""
        return caches.state_of_all(self.cache)

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Begin with `position` tokens that other sessions have read.

        Args:
            position: the number of tokens.
            rows: results of `rows`, in order, up to the position.
            state: the result of `state` at the position.
            room: tokens that are about to follow.
        """
        caches.restore_all(self.cache, position, rows, state, room)
        self.position = position
        self.start_computing()
