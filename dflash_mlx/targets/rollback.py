"""Removing rejected rows from a target's caches: one rollback per kind of cache.

A verify appends N rows to every cache; the commit keeps the first `kept` of them. The exact type of
a layer's cache decides its rollback, once per request. A subclass may store its rows differently,
so an unknown type is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import mlx.nn as nn

from ..errors import UnsupportedCacheError
from .caches import trim
from .deepseek_v41 import CompressedRollback
from .internals import (
    ArraysCache,
    CacheList,
    KVCache,
    LayerCache,
    QuantizedKVCache,
    RotatingKVCache,
    cut_ring,
    mixer_of,
)
from .overrides import Overrides
from .recurrent import RecurrentRollback, is_gated_delta
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


class RowRollback:
    """Rollback of a cache with a row per token: the last rows go, nothing is recorded.

    Args:
        remove: removes that many last rows from the cache.
    """

    def __init__(self, remove: Callable[[int], object]) -> None:
        self._remove = remove

    def begin(self, tree: Tree | None) -> None:
        """Nothing to record."""

    def commit(self, kept: int, rejected: int) -> None:
        """Remove the last `rejected` rows."""
        if rejected:
            self._remove(rejected)


def rollbacks_for(
    caches: Sequence[Any], layers: Sequence[nn.Module], overrides: Overrides
) -> list[Rollback]:
    """The rollbacks of all caches. Layers without a cache of their own come last.

    Raises `UnsupportedCacheError`, also for layers that run several times with several caches.
    """
    if len(caches) > len(layers):
        raise UnsupportedCacheError(
            f"The target keeps {len(caches)} caches for its {len(layers)} layers, from which this "
            "version cannot remove rejected drafts: choose another target."
        )
    pairs = zip(caches, layers, strict=False)
    return [rollback_for(cache, layer, overrides) for cache, layer in pairs]


def rollback_for(cache: Any, layer: nn.Module, overrides: Overrides) -> Rollback:
    """The rollback of a layer's cache.

    Args:
        cache: the layer's cache, just made by the model.
        layer: the decoder layer.
        overrides: the verify's overrides, to which recorders are added.

    Raises:
        UnsupportedCacheError: for an unknown kind of cache or of recurrence.
    """
    kind = type(cache)
    if kind is RotatingKVCache:
        # Its own `trim` refuses once the window has wrapped.
        return RowRollback(partial(cut_ring, cache))
    if kind in (KVCache, QuantizedKVCache) or (
        kind is CacheList and all(type(part) is KVCache for part in cache.caches)
    ):
        return RowRollback(partial(trim, cache))
    if kind is LayerCache:
        return CompressedRollback(cache, layer, overrides)
    if kind is ArraysCache and is_gated_delta(layer):
        return RecurrentRollback(cache, mixer_of(layer), overrides)
    raise UnsupportedCacheError(
        f"The target keeps a {kind.__name__} for a {type(layer).__name__}, from which this version "
        "cannot remove rejected drafts: choose another target."
    )
