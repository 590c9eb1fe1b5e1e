"""Removing rejected rows from the target's caches: one way per cache kind.

A verify forward appends N rows to every cache; the commit keeps the first `kept` of them. Which
way serves a layer is decided once, when the request starts, by the exact type of its cache:
a subclass may store its rows differently, and an unknown kind is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.nn as nn

from ..errors import UnsupportedCacheError
from .compressed import CompressedTape
from .internals import (
    ArraysCache,
    CacheList,
    KVCache,
    LayerCache,
    QuantizedKVCache,
    RotatingKVCache,
    mixer_of,
)
from .overrides import Overrides
from .recurrent import RecurrentTape, has_tape
from .rows import Rollback, RowRollback, cut_rotating_rows, trim_each


def rollbacks_for(
    caches: Sequence[Any], layers: Sequence[nn.Module], overrides: Overrides
) -> list[Rollback]:
    """The ways of all caches. Layers that share earlier ones' keys and values come last: no cache.

    Raises `UnsupportedCacheError`, also where layers run several times, each time with another
    cache: which of them a layer's row is in is then the model's own affair.
    """
    if len(caches) > len(layers):
        raise UnsupportedCacheError(
            f"The target keeps {len(caches)} caches for its {len(layers)} layers, from which this "
            "version cannot remove rejected drafts: choose another target."
        )
    pairs = zip(caches, layers, strict=False)
    return [rollback_for(cache, layer, overrides) for cache, layer in pairs]


def rollback_for(cache: Any, layer: nn.Module, overrides: Overrides) -> Rollback:
    """The way to take rejected rows out of this layer's cache.

    Args:
        cache: the layer's cache, just made by the model.
        layer: the decoder layer.
        overrides: where recorders are added that the way needs during a verify.

    Raises:
        UnsupportedCacheError: for a kind of cache or of recurrence that is not known here.
    """
    kind = type(cache)
    if kind is KVCache or kind is QuantizedKVCache:
        return RowRollback(cache.trim)
    if kind is RotatingKVCache:
        return RowRollback(partial(cut_rotating_rows, cache))
    if kind is CacheList and all(type(part) is KVCache for part in cache.caches):
        return RowRollback(partial(trim_each, cache))
    if kind is LayerCache:
        return CompressedTape(cache, layer, overrides)
    if kind is ArraysCache and has_tape(layer):
        return RecurrentTape(cache, mixer_of(layer), overrides)
    raise UnsupportedCacheError(
        f"The target keeps a {kind.__name__} for a {type(layer).__name__}, from which this version "
        "cannot remove rejected drafts: choose another target."
    )
