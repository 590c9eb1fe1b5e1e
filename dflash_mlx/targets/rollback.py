"""Removing rejected rows from a target's caches: one rollback per kind of cache.

A verify appends N rows to every cache; the commit keeps the first `kept` of them. The exact type of
a layer's cache decides its rollback, once per request. A subclass may store its rows differently,
so an unknown type has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import mlx.nn as nn

from .caches import leaves
from .deepseek_v41 import CompressedRollback
from .internals import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    LayerCache,
    QuantizedKVCache,
    RotatingKVCache,
    cut_ring,
)
from .overrides import Overrides
from .recurrences import recurrence_of
from .recurrent import RecurrentRollback
from .tree import Tree


class Rollback(Protocol):
    """Removes rejected rows from one layer's cache, for one request."""

    def begin(self, tree: Tree | None) -> None:
        """Prepare for a verify of this tree, or of a chain."""

    def commit(self, kept: int, rejected: int) -> None:
        """Leave the first `kept` rows of the last verify in the cache, and no others."""


@runtime_checkable
class SupportsTrees(Rollback, Protocol):
    """A rollback whose layer reads the tree that `begin` got without a mask."""

    def move(self, kept: Sequence[int]) -> None:
        """Put the recorded rows of a path to the front, as those of a chain."""


@dataclass(frozen=True)
class RowRollback:
    """Rollback of a cache with a row per token: the last rows go, nothing is recorded.

    Attributes:
        removers: each removes that many last rows from a part of the cache.
        reads_trees: whether the model asks the cache for its masks.
    """

    removers: Sequence[Callable[[int], object]]
    reads_trees: bool

    def begin(self, tree: Tree | None) -> None:
        """Nothing to record."""

    def commit(self, kept: int, rejected: int) -> None:
        """Remove the last `rejected` rows."""
        for remove in self.removers if rejected else ():
            remove(rejected)


def rollbacks_for(
    caches: Sequence[Any], layers: Sequence[nn.Module | None], overrides: Overrides
) -> list[Rollback]:
    """The rollbacks of all caches, each with the layer that gets it.

    Empty if rejected rows cannot be removed from one of them. Then the session goes back to a
    checkpoint, and the kept rows run again.
    """
    pairs = zip(caches, layers, strict=True)
    found = [rollback_for(cache, layer, overrides) for cache, layer in pairs]
    return [] if None in found else list(filter(None, found))


def rollback_for(cache: Any, layer: nn.Module | None, overrides: Overrides) -> Rollback | None:
    """The rollback of a layer's cache; None for an unknown kind of cache or of recurrence.

    Args:
        cache: the layer's cache, just made by the model.
        layer: the decoder layer.
        overrides: the verify's overrides, to which recorders are added.
    """
    removers = [_remover(part) for _, part in leaves([cache])]
    if None not in removers:
        chunks = any(type(part) is ChunkedKVCache for _, part in leaves([cache]))
        return RowRollback(list(filter(None, removers)), not chunks)
    if type(cache) is LayerCache and layer is not None:
        return CompressedRollback(cache, layer, overrides)
    recurrence = recurrence_of(layer)
    if type(cache) is ArraysCache and recurrence is not None:
        return RecurrentRollback(cache, recurrence, overrides)
    return None


def _remover(cache: Any) -> Callable[[int], object] | None:
    """What removes the last rows of a cache with a row per token; None for another cache."""
    if type(cache) is RotatingKVCache:
        # Its own `trim` refuses once the window has wrapped.
        return partial(cut_ring, cache)
    known = type(cache) in (KVCache, QuantizedKVCache, ChunkedKVCache)
    return cache.trim if known else None
