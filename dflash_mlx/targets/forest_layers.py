"""How the layers of a model take the rows of many requests: what is called in their place.

mlx-lm's attention asks its cache where rows stand and what they see, has its `rope` rotate them,
and calls attention by a global name. So its own code runs on all rows together (level 1): the cache
it gets stands for those of all requests, the rope turns each row to its own position, and the
function of that name attends for one request after the other. Where a layer does more than that, it
is called once for each request (level 0), its modules being meanwhile what they are in that
request's own forwards: what its rollback and its trees rely on is theirs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import attention_with, calls_attention
from .compressed import CompressedTape
from .forest_compressed import CompressedCaches, for_each_position
from .forest_mla import flat_mla, flat_sparse, for_each_pick
from .forest_recurrent import flat_recurrence
from .forest_rows import AXES, Caches, FlatCaches, Parts, Rows, joined, pick
from .internals import (
    ATTENTION,
    DeepseekV3Attention,
    DeepseekV32Attention,
    attention_of,
    has_indexer,
    is_mla,
    mixer_of,
    scaled_dot_product_attention,
)
from .overrides import Entry, Overrides, rebound, swapped
from .recurrent import RecurrentTape
from .target import Target
from .tree_attention import ropes, why_no_trees


class Layers:
    """A target's layers at a level: 1, or 0 for all that have attention.

    Raises `TypeError` for layers that nothing is known about.

    Attributes:
        level: 0 if any layer is called for each request.
    """

    def __init__(self, target: Target, rollbacks: Sequence[Any], level: int) -> None:
        self._model, self._overrides, self.level = target.model, target.overrides(), 1
        self._kinds: list[type[Caches]] = []
        self._layer_of: dict[int, int] = {}  # of modules that take one request's rows, by identity
        self._rows: Rows  # of the forward that runs,
        self._entries: list[dict[int, list[Entry]]] = []  # and what modules are for each request
        with target.forward_lock:
            self._wiring = target.wiring
            layers = target.layers
            flat = level and all(
                _is_flat(layer, rollback)
                for layer, rollback in zip_longest(layers, rollbacks)
                if attention_of(layer) is not None
            )
            for index, (layer, rollback) in enumerate(zip_longest(layers, rollbacks)):
                self._kinds.append(self._override(index, layer, rollback, level, bool(flat)))
            for rope in {id(rope): rope for layer in layers for rope in ropes(layer)}.values():
                if flat and id(rope) not in self._layer_of:
                    self._overrides.replace(rope, self._by_position(type(rope).__call__))

    def forward(self, rows: Rows, taps: Overrides) -> mx.array:
        """The model's logits [R, V] after each row, the layers that are tapped recording."""
        parts = zip(*(segment.caches for segment in rows.segments), strict=True)
        caches = [kind(rows, each) for kind, each in zip(self._kinds, parts, strict=False)]
        with rows.reading(), self._overrides.installed(taps):
            self._rows = rows
            self._entries = [self._by_layer(segment.entries) for segment in rows.segments]
            try:
                return self._model(rows.tokens[None], cache=caches)[0]
            finally:
                self._rows, self._entries = Rows([]), []  # nobody's caches are held on to

    def _by_layer(self, entries: Sequence[Entry]) -> dict[int, list[Entry]]:
        """A request's overrides of modules that take its rows alone."""
        found: dict[int, list[Entry]] = {}
        for module, cls in entries:
            if id(module) in self._layer_of:
                found.setdefault(self._layer_of[id(module)], []).append((module, cls))
        return found

    def _override(
        self, index: int, layer: nn.Module, rollback: Any, level: int, flat: bool
    ) -> type[Caches]:
        """Have a layer take many requests' rows; the kind of what it gets for a cache."""
        attention, mixer = attention_of(layer), mixer_of(layer)
        if level and isinstance(rollback, RecurrentTape):
            self._overrides.replace(mixer, flat_recurrence(index))
            return Caches
        if flat and attention is not None:
            self._overrides.replace(attention, self._flat(index, attention, is_mla(layer)))
            return FlatCaches
        module = mixer if attention is None else attention
        if module is None:
            raise TypeError(f"A {type(layer).__name__} with neither attention nor a recurrence.")
        self.level, call = 0, self._for_each(index, module, joined)
        if isinstance(rollback, CompressedTape):
            self._overrides.replace(module, for_each_position(call))
            return CompressedCaches
        self._overrides.replace(module, call)
        return Caches

    def _for_each(
        self, index: int, module: nn.Module, join: Callable[[Sequence[Any]], Any]
    ) -> Callable[..., Any]:
        """What stands for a layer's module that is called once for each request."""
        self._layer_of |= {id(part): index for part in module.modules()}
        own = type(module)

        def call(module: nn.Module, x: mx.array, *args: Any, **named: Any) -> Any:
            outputs = []
            for at, part in enumerate(self._rows.split(x)):
                entries = self._entries[at].get(index, [])
                with swapped([(module, own), *entries]):
                    others = {name: pick(value, at) for name, value in named.items()}
                    outputs.append(module(part, *(pick(value, at) for value in args), **others))
            return join(outputs)

        return call

    def _flat(self, index: int, attention: Any, mla: bool) -> Callable[..., Any]:
        """What stands for an attention that takes all rows: its own code, parting in one place."""
        if has_indexer(attention):
            self._overrides.replace(
                attention.indexer, for_each_pick(self._for_each(index, attention.indexer, Parts))
            )
            return flat_sparse(lambda: self._rows)
        if mla:
            attend = self._for_each_cache(scaled_dot_product_attention)
            return flat_mla(attend, lambda: self._rows)
        own = attention_with(self._wiring) if self._wiring else scaled_dot_product_attention
        return rebound(type(attention).__call__, **{ATTENTION: self._for_each_cache(own)})

    def _for_each_cache(self, own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """What stands for an attention function: `own` is called for each request."""

        def attend(
            queries: mx.array,
            keys: Parts,
            values: Parts,
            cache: Caches | None,
            scale: float,
            mask: Parts,
            sinks: mx.array | None = None,
        ) -> mx.array:
            """queries [1, H, R, D] -> [1, H, R, Dv]; no cache where keys are an earlier layer's."""
            rows = self._rows.split(queries, 2)
            caches = [None] * len(rows) if cache is None else cache.parts
            each = zip(rows, keys.parts, values.parts, caches, mask.parts, strict=True)
            outputs = [own(q, k, v, one, scale, seen, sinks) for q, k, v, one, seen in each]
            return mx.concatenate(outputs, axis=2)

        return attend

    def _by_position(self, own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """A rotation of x [1, H, R, D], each row at its own position."""

        def call(rope: nn.Module, x: mx.array, offset: Any = 0, **settings: Any) -> mx.array:
            if not isinstance(offset, mx.array) or offset.ndim != AXES or x.ndim != 4:
                raise TypeError("A rotation that is not of each row by its position.")
            # Rows on the batch axis: there each may have its own position.
            positions = self._rows.positions
            return own(rope, x.swapaxes(0, 2), offset=positions, **settings).swapaxes(0, 2)

        return call


def _is_flat(layer: nn.Module, rollback: Any) -> bool:
    """Whether a layer's attention is one that takes all rows together."""
    attention = attention_of(layer)
    if why_no_trees(layer, rollback) is not None:
        return False
    if is_mla(layer):
        return type(attention) in (DeepseekV3Attention, DeepseekV32Attention)
    return calls_attention(attention)
