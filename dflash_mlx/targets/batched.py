"""Verifying the drafts of many requests in one forward of the target.

All rows lie in one sequence, each request's after another's; or, if all have as many and slots in
one array (`kv_slots`), on the batch axis. Only attention and recurrence part them, so weights are
read once. Requests without a slot run attention and recurrence on their own cache, as they would
alone.

The layers' own code runs on all rows. mlx-lm's attention asks its cache for masks and positions,
has its `rope` rotate rows, and calls attention by a global name. So it gets a cache that stands for
all requests', a rope that rotates each row by its own position, and a function of that name that
attends per request. A model with a layer that does more runs one forward per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..memory import compute
from ..proposal import Proposal
from . import caches, mla
from .attention import attention_function, calls_attention
from .batched_rows import (
    AXES,
    BatchedCache,
    BatchedKVCache,
    BatchRows,
    PerRequest,
    RequestRows,
)
from .caches import kind_of
from .internals import (
    ATTENTION,
    DeepseekV3Attention,
    DeepseekV32Attention,
    attention_of,
    is_mla,
    mixer_of,
    scaled_dot_product_attention,
)
from .kv_slots import KVSlots
from .overrides import Overrides, rebind_globals
from .recurrent import RecurrentRollback, batched_recurrence
from .session import PromptEnd, TargetSession
from .taps import TapRecorder
from .target import Target
from .tree_attention import ropes, why_no_trees

Verified = tuple[mx.array, mx.array]  # logits [R, V], taps [1, R, K*D]
# The errors of a model that needs more of its cache or its rows than a batch has.
UNFIT = (AttributeError, IndexError, TypeError, ValueError)


class BatchVerifier:
    """Verifies the proposals of many requests of one target.

    Attributes:
        shares_forwards: whether requests share a forward; else there is one for each.
        slot_layers: the caches that requests have in slots, by number.
        reads_prompts: whether `read` is possible.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._starts_early = False  # whether a forward's first layers run while others are built
        self._tapped: dict[tuple[int, ...], tuple[Overrides, TapRecorder]] = {}
        self._layers = self._try()
        self.shares_forwards = self._layers is not None
        exact = target.wiring is not None and target.wiring.exact
        alone = exact or target.is_distributed or not target.parts.norm_runs_once
        self.reads_prompts = self._layers is not None and self._layers.as_prefill and not alone
        self.slot_layers = () if self._layers is None else self._layers.slots.layers

    def verify(
        self,
        sessions: Sequence[TargetSession],
        proposals: Sequence[Proposal],
        tokens: mx.array | None = None,
    ) -> Verified:
        """One forward over all proposals. Every session is then as after its own `verify`.

        Args:
            sessions: different sessions of this target, with the same `tap_layers`.
            proposals: one per session: chains and trees, of any number of rows.
            tokens: [R] of proposals of one row each, in place of the tokens in them.

        Returns the logits [R, V] after the rows and their taps [1, R, K*D]. Nothing is evaluated.

        Raises as `TargetSession.verify` does, before anything has changed. Exact verification
        takes at most `Wiring.widest` rows per forward, so more rows run in several forwards.
        """
        forward = partial(self._forward, tokens=tokens)
        verified: Verified = self._target.verify_batch(forward, sessions, proposals)
        return verified

    def _forward(
        self,
        sessions: Sequence[TargetSession],
        proposals: Sequence[Proposal],
        tokens: mx.array | None,
    ) -> Verified:
        self._starts_early = tokens is None  # else they come from a step that still runs
        forwards = [*self._forwards([len(proposal) for proposal in proposals])]
        if tokens is not None and len(forwards) > 1:
            proposals, tokens = [Proposal(row) for row in mx.split(tokens, len(tokens))], None
        rows = [one.request_rows(of) for one, of in zip(sessions, proposals, strict=True)]
        results: list[Verified] = []
        for first, end in forwards:
            if self._layers is None or end == first + 1:
                results.append(sessions[first].verify(proposals[first]))
            else:
                each = sessions[first:end], rows[first:end]
                results.append(self._verify(self._layers, *each, tokens))
        if len(results) == 1:
            return results[0]
        logits, taps = zip(*results, strict=True)
        return mx.concatenate([*logits]), mx.concatenate([*taps], axis=1)

    def read(self, ends: Sequence[PromptEnd]) -> None:
        """Read the ends of prompts in one forward, and set their results; only if `reads_prompts`.

        They are rows of a verify that are all kept, but the head computes the last ones only.
        """
        assert self._layers is not None
        for end in ends:
            end.session.leave_slot()
        sessions = [end.session for end in ends]
        rows = [end.session.request_rows(Proposal(end.tokens)) for end in ends]
        self._starts_early = True
        logits, taps = self._verify(self._layers, sessions, rows, last_only=True)
        for end in ends:
            end.session.commit(range(len(end.tokens)))
        compute(logits, [caches.arrays(cache) for request in rows for cache in request.caches])
        mx.clear_cache()
        cuts = [*accumulate(len(end.tokens) for end in ends)][:-1]
        parts = zip(ends, mx.split(logits, len(ends)), mx.split(taps, cuts, axis=1), strict=True)
        for end, last, own in parts:
            end.result = last, own

    def _forwards(self, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Which requests share a forward: the first one and the one after the last."""
        wiring, first = self._target.wiring, 0
        most = None if wiring is None else wiring.widest
        for end in range(1, len(widths) + 1):
            alone = not self.shares_forwards or end == len(widths)
            if alone or (most is not None and sum(widths[first : end + 1]) > most):
                yield first, end
                first = end

    def _verify(
        self,
        layers: BatchedLayers,
        sessions: Sequence[TargetSession],
        requests: Sequence[RequestRows],
        tokens: mx.array | None = None,
        last_only: bool = False,
    ) -> Verified:
        """One forward over requests; with `last_only`, without slots, the last rows' logits."""
        if not last_only:
            layers.slots.arrange(sessions, [len(request.proposal) for request in requests])
        for session, request in zip(sessions, requests, strict=True):
            session.begin(request.proposal, request.tree)
        slots = [session.slot for session in sessions]
        rows = BatchRows(requests, slots, tokens, layers.stacks)
        overrides, recorder = self._taps(sessions[0].tap_layers)
        logits = layers.forward(rows, overrides, *([layers.last_rows] if last_only else []))
        taps = recorder.take(len(rows))
        return logits, taps.reshape(1, len(rows), taps.shape[-1])

    def _taps(self, tapped: tuple[int, ...]) -> tuple[Overrides, TapRecorder]:
        """A recorder of these layers, and its overrides."""
        if tapped not in self._tapped:
            with self._target.forward_lock:
                overrides = Overrides(self._target.forward_lock)
                self._tapped[tapped] = overrides, self._target.tap(tapped, overrides)
                self._target.hand_over(overrides, lambda: self._starts_early)
        return self._tapped[tapped]

    def _try(self) -> BatchedLayers | None:
        """The layers for many requests; None if the model's forward cannot be built with them.

        The forward is built for two new requests and never computed.
        """
        sessions = self._target.start(), self._target.start()
        proposals = Proposal([0, 0]), Proposal([0])
        rows = [one.request_rows(of) for one, of in zip(sessions, proposals, strict=True)]
        try:
            layers = BatchedLayers(self._target, rows[0])
            self._verify(layers, sessions, rows)
        except UNFIT:
            return None
        if layers.stacks:
            try:
                for session in sessions:
                    session.dry_run(1)
                self._verify(layers, sessions, [one.request_rows(proposals[1]) for one in sessions])
            except UNFIT:
                layers.stacks = False
        return layers


class BatchedLayers:
    """A target's layers, overridden to take many requests' rows.

    Raises `TypeError` for layers that cannot.

    Args:
        target: the target.
        request: of a session, whose caches and rollbacks tell the layers' kinds.

    Attributes:
        slots: where layers with plain keys and values have those of all requests.
        stacks: whether these are all layers, so that requests may be on the batch axis.
        as_prefill: whether a verify computes the same as a prefill, bit for bit.
        last_rows: has the head compute each request's last row only.
    """

    def __init__(self, target: Target, request: RequestRows) -> None:
        rollbacks, in_slots = request.rollbacks, list[int]()
        self._vocab_size = target.vocab_size
        self._model, self._overrides = target.model, Overrides(target.forward_lock)
        self._kinds: list[Callable[..., BatchedCache]] = []
        self._rows: BatchRows  # of the current forward
        with target.forward_lock:
            self._wiring = target.wiring
            self._attend = self._attend_each(attention_function(target.wiring))
            if not rollbacks:
                raise TypeError("Its kept rows run again, request by request.")
            pairs = target.parts.pairs(rollbacks)
            for index, (layer, rollback) in enumerate(pairs):
                kind: Any = self._override(index, layer, rollback)
                if kind is BatchedKVCache and self._fits_slots(layer, request.caches[index:][:1]):
                    kind = partial(BatchedKVCache, layer=len(in_slots))
                    in_slots.append(index)
                self._kinds.append(kind)
            self.slots = KVSlots(in_slots)
            self.stacks = len(in_slots) == len(request.caches)
            recurrent = [one for one in rollbacks if isinstance(one, RecurrentRollback)]
            self.as_prefill = all(one.recurrence.as_prefill for one in recurrent)
            self.as_prefill &= not any(is_mla(layer) for layer, _ in pairs)
            self.last_rows = Overrides(target.forward_lock)
            target.last_logits_only(self.last_rows, lambda: self._rows.last)
            found = (rope for layer in target.layers for rope in ropes(layer))
            for rope in {id(rope): rope for rope in found}.values():
                self._overrides.replace(rope, self._by_position(type(rope).__call__))

    def forward(self, rows: BatchRows, *others: Overrides) -> mx.array:
        """The model's logits [R, V] after each row, with other overrides, as the taps'."""
        parts = zip(*(request.caches for request in rows.requests), strict=True)
        caches = [kind(rows, each) for kind, each in zip(self._kinds, parts, strict=False)]
        with rows.reading_trees(), self._overrides.installed(*others):
            self._rows = rows
            try:
                ids = rows.tokens(self._vocab_size).reshape(rows.shape)
                return self._model(ids, cache=caches).flatten(0, 1)
            finally:
                self._rows = BatchRows([])  # keep no request's caches alive

    def _override(self, index: int, layer: nn.Module | None, rollback: Any) -> type[BatchedCache]:
        """Have a layer take many requests' rows; returns the kind of its cache.

        `index` is the place of the cache, or beyond those for a layer without one.
        """
        attention = attention_of(layer)
        if isinstance(rollback, RecurrentRollback):
            self._overrides.replace(mixer_of(layer), batched_recurrence(index))
            return BatchedCache
        if attention is None and rollback is None:
            return BatchedCache  # nothing in it looks at other rows
        if attention is None or not _shares_rows(layer, rollback):
            raise TypeError(f"A {type(layer).__name__} takes one request at a time.")
        self._overrides.replace(attention, self._attention(attention, is_mla(layer)))
        return BatchedKVCache

    def _fits_slots(self, layer: nn.Module | None, caches: Sequence[Any]) -> bool:
        """Whether a layer's cache, if it has one, may be in slots.

        Exact kernels read one request's cache. MLA's latents have an attention of their own.
        """
        exact = self._wiring is not None and self._wiring.exact
        plain = [kind.is_plain for kind in map(kind_of, caches)] == [True]
        return plain and not exact and not is_mla(layer)

    def _attention(self, attention: Any, latent: bool) -> Callable[..., Any]:
        """The call of an attention layer that takes all rows and attends per request."""
        if type(attention) is DeepseekV32Attention:
            self._overrides.replace(attention.indexer, mla.batched_indexer(attention.indexer))
            return mla.batched_sparse(lambda: self._rows)
        if latent:
            attend = self._attend_each(scaled_dot_product_attention)
            return mla.batched_dense(attend, lambda: self._rows)
        return rebind_globals(type(attention).__call__, **{ATTENTION: self._attend})

    def _attend_each(self, own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """An attention function that calls `own` for each request."""

        def attend(
            queries: mx.array,
            keys: PerRequest,
            values: PerRequest,
            cache: BatchedCache | None,
            scale: float,
            mask: PerRequest,
            sinks: mx.array | None = None,
        ) -> mx.array:
            """queries [1, H, R, D] -> [1, H, R, Dv]; no cache for an earlier layer's keys."""
            rows = self._rows
            slots = zip(rows.slots, keys.in_slots, values.in_slots, mask.in_slots, strict=False)
            shared = [
                own(of.rows_of(queries), k, v, None, scale, seen, sinks) for of, k, v, seen in slots
            ]
            numbers = rows.own if shared else range(len(rows.requests))
            caches = [None] * len(rows.requests) if cache is None else cache.parts
            parts = rows.split(queries, 2) if numbers else []
            outputs = []
            for at in numbers:
                held = keys.parts[at], values.parts[at], caches[at]
                outputs.append(own(parts[at], *held, scale, mask.parts[at], sinks))
            return rows.join(shared, outputs) if shared else mx.concatenate(outputs, axis=2)

        return attend

    def _by_position(self, own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """A rotation of x [1, H, R, D], each row by its own position."""

        def call(rope: nn.Module, x: mx.array, offset: Any = 0, **settings: Any) -> mx.array:
            if not isinstance(offset, mx.array) or offset.ndim != AXES or x.ndim != 4:
                raise TypeError("This rotation does not rotate each row by its position.")
            # Rows on the batch axis: there each may have its own position.
            positions = offset.flatten()
            if self._rows.shape[0] > 1:
                return own(rope, x, offset=positions, **settings)
            return own(rope, x.swapaxes(0, 2), offset=positions, **settings).swapaxes(0, 2)

        return call


def _shares_rows(layer: nn.Module | None, rollback: Any) -> bool:
    """Whether a layer's attention can take all requests' rows together."""
    attention = attention_of(layer)
    if why_no_trees(layer, rollback) is not None:
        return False
    if is_mla(layer):
        return type(attention) in (DeepseekV3Attention, DeepseekV32Attention)
    return calls_attention(attention)
