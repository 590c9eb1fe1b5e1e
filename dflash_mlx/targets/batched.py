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
from .batched_rows import BatchedCache, BatchRows, OneRequestCache, PerRequest
from .caches import FullCache, RecurrentCache
from .internals import (
    ATTENTION,
    DeepseekV3Attention,
    DeepseekV32Attention,
    attention_of,
    is_mla,
    scaled_dot_product_attention,
)
from .kv_slots import KVSlots
from .overrides import Overrides, rebind_globals
from .parts import MODEL_ERRORS
from .recurrences import recurrence_of
from .session import PromptPiece, TargetSession
from .target import Target
from .tree_attention import why_no_trees

Verified = tuple[mx.array, mx.array]  # logits [R, V], taps [1, R, K*D]


class BatchVerifier:
    """Verifies the proposals of many requests of one target.

    Attributes:
        shares_forwards: whether requests share a forward; else there is one for each.
        slot_layers: the caches that requests have in slots, by number.
        reads_prompts: whether `read` is possible.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
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
        forwards = [*self._forwards([len(proposal) for proposal in proposals])]
        if tokens is not None and len(forwards) > 1:
            proposals, tokens = [Proposal(row) for row in mx.split(tokens, len(tokens))], None
        for session, proposal in zip(sessions, proposals, strict=True):
            session.plan(proposal)
        results: list[Verified] = []
        for first, end in forwards:
            if self._layers is None or end == first + 1:
                results.append(sessions[first].verify(proposals[first]))
            else:
                results.append(self._layers.forward(sessions[first:end], tokens))
        if len(results) == 1:
            return results[0]
        logits, taps = zip(*results, strict=True)
        return mx.concatenate([*logits]), mx.concatenate([*taps], axis=1)

    def read(self, ends: Sequence[PromptPiece]) -> list[Verified]:
        """Read the ends of prompts in one forward: what `TargetSession.read` returns for each.

        Only if `reads_prompts`. They are rows of a verify that are all kept, but the head computes
        the last ones only.
        """
        assert self._layers is not None
        sessions = [end.session for end in ends]
        for end in ends:
            end.session.leave_slot()
            end.session.plan(Proposal(end.tokens))
        logits, taps = self._layers.forward(sessions, last_only=True)
        for end in ends:
            end.session.commit(range(len(end.tokens)))
        compute(logits, [caches.arrays_of_all(session.cache) for session in sessions])
        mx.clear_cache()
        cuts = [*accumulate(len(end.tokens) for end in ends)][:-1]
        return [*zip(mx.split(logits, len(ends)), mx.split(taps, cuts, axis=1), strict=True)]

    def _forwards(self, widths: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Which requests share a forward: the first one and the one after the last."""
        wiring, first = self._target.wiring, 0
        most = None if wiring is None else wiring.widest
        for end in range(1, len(widths) + 1):
            alone = not self.shares_forwards or end == len(widths)
            if alone or (most is not None and sum(widths[first : end + 1]) > most):
                yield first, end
                first = end

    def _try(self) -> BatchedLayers | None:
        """The layers for many requests; None if the model's forward cannot be built with them.

        The forward is built for two new requests and never computed.
        """
        sessions = self._target.start(), self._target.start()
        for session, proposal in zip(sessions, (Proposal([0, 0]), Proposal([0])), strict=True):
            session.plan(proposal)
        try:
            layers = BatchedLayers(self._target, sessions[0])
            layers.forward(sessions)
        except MODEL_ERRORS:
            return None
        if layers.stacks:
            try:
                for session in sessions:
                    session.dry_run(1)
                    session.plan(Proposal([0]))
                layers.forward(sessions)
            except MODEL_ERRORS:
                layers.stacks = False
        return layers


class BatchedLayers:
    """A target's layers, overridden to take many requests' rows.

    Raises `TypeError` for layers that cannot.

    Args:
        target: the target.
        session: one of its sessions, whose caches tell the layers' kinds.

    Attributes:
        slots: where layers with plain keys and values have those of all requests.
        stacks: whether these are all layers, so that requests may be on the batch axis.
        as_prefill: whether a verify computes the same as a prefill, bit for bit.
    """

    def __init__(self, target: Target, session: TargetSession) -> None:
        if not target.has_rollback:
            raise TypeError("Its kept rows run again, request by request.")
        self._target, self._overrides = target, Overrides(target.forward_lock)
        self._numbers: list[int | None] = []  # of each cache, among those in slots
        in_slots: list[int] = []
        with target.forward_lock:
            self._verifying = target.verifying
            self._attend = _attend_each(attention_function(target.wiring))
            exact = target.wiring is not None and target.wiring.exact
            pairs = target.parts.pairs(session.cache)
            for index, (layer, cache) in enumerate(pairs):
                self._override(layer, cache)
                # Exact kernels read one request's cache, and MLA's latents have another attention.
                fits = isinstance(cache, FullCache) and not exact and not is_mla(layer)
                self._numbers.append(len(in_slots) if fits else None)
                in_slots += [index] if fits else []
            self.slots = KVSlots(in_slots)
            self.stacks = len(in_slots) == len(session.cache)
            recurrences = filter(None, (recurrence_of(layer) for layer, _ in pairs))
            self.as_prefill = all(one.as_prefill for one in recurrences)
            self.as_prefill &= not any(is_mla(layer) for layer, _ in pairs)
            self._last_rows = Overrides(target.forward_lock)
            target.last_logits_only(self._last_rows, self._last)

    def forward(
        self,
        sessions: Sequence[TargetSession],
        tokens: mx.array | None = None,
        last_only: bool = False,
    ) -> Verified:
        """One forward over the sessions' proposals; `tokens` as of `BatchVerifier.verify`.

        With `last_only`, requests have no slots, and only their last rows have logits.
        """
        if not last_only:
            self.slots.arrange(sessions)
        for session in sessions:
            session.begin()
        rows = BatchRows(sessions, tokens, self.stacks)
        parts = zip(*(session.cache for session in sessions), strict=True)
        numbered = zip(parts, self._numbers, strict=False)
        caches = [BatchedCache(rows, each, number) for each, number in numbered]
        sets = [self._verifying, self._target.rotating, self._overrides]
        sets += [self._last_rows] if last_only else []
        logits, taps = self._target.forward(
            rows.tokens(self._target.vocab_size).reshape(rows.shape),
            caches,
            sessions[0].tap_layers,
            *sets,
            reading=sessions,
            starts_early=tokens is None,  # else they come from a step that still runs
        )
        return logits.flatten(0, 1), taps.reshape(1, len(rows), taps.shape[-1])

    def _last(self) -> mx.array:
        """Each request's last row in the running forward, [n] int32."""
        ends = accumulate(len(session.proposal) for session in self._target.reading)
        return mx.array([*ends], mx.int32) - 1

    def _override(self, layer: nn.Module | None, cache: Any) -> None:
        """Have a layer take many requests' rows."""
        attention = attention_of(layer)
        if isinstance(cache, RecurrentCache) or attention is None and cache is None:
            return  # it parts the requests' rows, or looks at no other rows at all
        if attention is None or not _shares_rows(layer, cache):
            raise TypeError(f"A {type(layer).__name__} takes one request at a time.")
        self._overrides.replace(attention, self._attention(attention, is_mla(layer)))

    def _attention(self, attention: Any, latent: bool) -> Callable[..., Any]:
        """The call of an attention layer that takes all rows and attends per request."""
        if type(attention) is DeepseekV32Attention:
            self._overrides.replace(attention.indexer, _indexer(attention.indexer))
            return _sparse_mla()
        if latent:
            return _dense_mla(_attend_each(scaled_dot_product_attention))
        return rebind_globals(type(attention).__call__, **{ATTENTION: self._attend})


def _attend_each(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
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
        rows = keys.rows
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


def _dense_mla(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """DeepSeek-V3's attention over many requests; `attend` attends for each of them."""

    def scores(attention: Any, queries: mx.array, keys: PerRequest, mask: PerRequest) -> PerRequest:
        """The rotary scores [1, H, n, K] of each request, from queries [1, H, R, D]."""
        each = zip(keys.rows.split(queries, 2), keys.parts, mask.parts, strict=True)
        return PerRequest(keys.rows, (mla.rotary_scores(attention, *parts) for parts in each))

    return rebind_globals(mla.dense, **{ATTENTION: attend, mla.rotary_scores.__name__: scores})


def _sparse_mla() -> Callable[..., mx.array]:
    """DeepSeek-V3.2's attention over many requests, whose indexer returns `PerRequest`."""

    def attend(
        attention: Any, q: mx.array, q_pe: mx.array, *others: PerRequest | BatchedCache
    ) -> mx.array:
        """The outputs [1, H, R, v_head_dim] of all requests' queries."""
        queries = (others[0].rows.split(x, 2) for x in (q, q_pe))
        each = zip(*queries, *(other.parts for other in others), strict=True)
        outputs = [mla.attend_to_picked(attention, *parts) for parts in each]
        return mx.concatenate(outputs, axis=2)

    return rebind_globals(mla.sparse, **{mla.attend_to_picked.__name__: attend})


def _indexer(indexer: nn.Module) -> Callable[..., PerRequest]:
    """The call of an indexer over many requests, one after another."""
    own = type(indexer).__call__

    def call(
        indexer: nn.Module, x: mx.array, residual: mx.array, mask: PerRequest, cache: BatchedCache
    ) -> PerRequest:
        """The rows that each request's queries pick, from all rows x and residual [1, R, D]."""
        rows = cache.rows
        caches = map(OneRequestCache, cache.parts, rows.split(rows.offset, 0))
        each = zip(rows.split(x), rows.split(residual), mask.parts, caches, strict=True)
        return PerRequest(rows, (own(indexer, *parts) for parts in each))

    return call


def _shares_rows(layer: nn.Module | None, cache: Any) -> bool:
    """Whether a layer's attention can take all requests' rows together."""
    attention = attention_of(layer)
    if why_no_trees(layer, cache) is not None:
        return False
    if is_mla(layer):
        return type(attention) in (DeepseekV3Attention, DeepseekV32Attention)
    return calls_attention(attention)
