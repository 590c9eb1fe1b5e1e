"""DeepSeek-V4.1's compressed attention in a verify: rollback, and many requests.

A layer keeps a sliding window of rows. Some layers also pool every `ratio` rows into a compressed
entry, and an indexer picks entries for each row; rows of the group that is still open wait with
their gates.

Rollback: a rejected row may have closed a group or pushed an old row out of the window. So the
fields before the verify are held by reference, the verify's rows are recorded, and the commit puts
the kept ones behind the old ones. No layer runs again. Trees are not read: no published drafter of
trees fits these models.

Many requests: the model asks the first layer's cache once for position and window, and hands a
dictionary from layer to layer. In a batch there is one of each per request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .batched_rows import BatchedCache, PerRequest
from .internals import (
    LayerCache,
    attention_of,
    compression,
    watch_window,
    window_indices,
)
from .overrides import Overrides
from .tree import Tree


class CompressedRollback:
    """The rows that one verify put into a DeepSeek-V4.1 layer's cache, for one request.

    Args:
        cache: the layer's cache.
        layer: its `DecoderLayer`.
        overrides: the verify's overrides, to which the recorders are added.
    """

    reads_trees = False

    def __init__(self, cache: LayerCache, layer: nn.Module, overrides: Overrides) -> None:
        self._cache = cache
        self._rows: mx.array  # of the window, [1, S, D], in the last verify
        watch_window(cache, self._record_window)
        # With a ratio of 1 every row is its own group, and none is ever open.
        self._ratio = compression(attention_of(layer))
        self._pending: dict[str, mx.array] = {}
        if self._ratio > 1:
            compressor = attention_of(layer).compressor
            overrides.watch(compressor.kv_proj, lambda _, rows: self._pending.update(kv=rows))
            overrides.watch(compressor.gate_proj, lambda _, rows: self._pending.update(gate=rows))

    def begin(self, tree: Tree | None) -> None:
        """Hold on to the fields that the next verify replaces."""
        cache = self._cache
        self._window, self._offset = cache.window, cache.offset
        self._open_kv, self._open_gate = cache.pending_kv, cache.pending_gate

    def commit(self, kept: int, rejected: int) -> None:
        """Set the cache to its value after the first `kept` rows of the verify."""
        if not rejected:
            return
        cache = self._cache
        cache.window = _append(self._window, self._rows[:, :kept])[:, -cache.window_size :]
        cache.offset = self._offset + kept
        if self._ratio == 1:
            self._trim_entries(cache.offset)
        elif self._ratio:
            kv = _append(self._open_kv, self._pending["kv"][:, :kept])
            gate = _append(self._open_gate, self._pending["gate"][:, :kept])
            closed = kv.shape[1] - kv.shape[1] % self._ratio
            cache.pending_kv, cache.pending_gate = kv[:, closed:], gate[:, closed:]
            self._trim_entries(cache.offset // self._ratio)

    def _record_window(self, rows: mx.array) -> None:
        self._rows = rows

    def _trim_entries(self, groups: int) -> None:
        """Forget the compressed entries after the first `groups`."""
        cache = self._cache
        cache.compress_kv = _first(cache.compress_kv, groups)
        cache.index_k = _first(cache.index_k, groups)


class BatchedCompressedCache(BatchedCache):
    """Of a DeepSeek-V4.1 layer. The model asks for offset and window, and they are not used."""

    offset, window = 0, None


def batched_attention(for_each: Callable[..., Any]) -> Callable[..., Any]:
    """The call of an attention layer over many requests; `for_each` calls it for each."""

    def call(
        attention: nn.Module, x: mx.array, *, cache: BatchedCache, shared: dict[str, Any], **_: Any
    ) -> mx.array:
        """x [1, R, D] of all requests -> [1, R, D]; all layers of a forward get one `shared`."""
        if not shared:  # the first layer
            pairs = zip(cache.parts, cache.rows.widths, strict=True)
            shared["start"] = PerRequest(one.offset for one in cache.parts)
            shared["windows"] = PerRequest(window_indices(one, rows)[None] for one, rows in pairs)
            shared["shared"] = PerRequest({} for _ in cache.parts)
        return for_each(
            attention,
            x,
            start_pos=shared["start"],
            window_idx=shared["windows"],
            cache=cache,
            shared=shared["shared"],
        )

    return call


def _first(entries: mx.array | None, groups: int) -> mx.array | None:
    """The first entries [1, groups, D], if there are any."""
    return None if entries is None or not groups else entries[:, :groups]


def _append(held: mx.array | None, new: mx.array) -> mx.array:
    """Rows [1, S, D] appended to those held, if any."""
    return new if held is None else mx.concatenate([held, new], axis=1)
