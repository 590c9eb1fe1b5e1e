"""Removing rejected rows from the target's caches: one way per cache kind.

A verify forward appends N rows to every cache; the commit keeps the first `kept` of them. Which
way serves a layer is decided once, when the request starts, by the exact type of its cache:
a subclass may store its rows differently, and an unknown kind is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import UnsupportedCacheError
from .overrides import Overrides


class Rollback(Protocol):
    """How one layer's cache forgets rejected rows, for one request."""

    def begin(self) -> None:
        """Get ready for a verify forward."""

    def keep(self, kept: int, rejected: int) -> None:
        """Leave the first `kept` rows of the last verify in the cache, not the others."""


class RowRollback:
    """Rollback of a cache that holds a row per token: the last rows go, nothing is remembered."""

    def __init__(self, cache: Any, remove: Callable[[Any, int], None]) -> None:
        self._cache, self._remove = cache, remove

    def begin(self) -> None:
        pass

    def keep(self, kept: int, rejected: int) -> None:
        if rejected:
            self._remove(self._cache, rejected)


def trim_rows(cache: KVCache | QuantizedKVCache, rejected: int) -> None:
    """Forget the last rows of a cache that never drops any; the next rows overwrite them.

    MLA keeps its latents and rotary keys in the same kind of cache.
    """
    cache.trim(rejected)


def cut_rotating_rows(cache: RotatingKVCache, rejected: int) -> None:
    """Forget the last rows of a sliding window, wrapped or not.

    A forward of several rows leaves the rows in temporal order and `max_size - 1` older ones
    before them, so cutting the end loses nothing that a later row can see. (The cache's own
    `trim` refuses once the window has wrapped, and would leave the ring in the wrong order.)
    """
    end = cache._idx - rejected
    cache.keys, cache.values = cache.keys[..., :end, :], cache.values[..., :end, :]
    cache._idx = end
    cache.offset -= rejected


def trim_each(cache: CacheList, rejected: int) -> None:
    """Forget the last rows of every cache of a layer that has several (GLM-5, DeepSeek-V3.2)."""
    for part in cache.caches:
        trim_rows(part, rejected)


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
        return RowRollback(cache, trim_rows)
    if kind is RotatingKVCache:
        return RowRollback(cache, cut_rotating_rows)
    if kind is CacheList and all(type(part) is KVCache for part in cache.caches):
        return RowRollback(cache, trim_each)
    tape = _tape(cache, layer, overrides)
    if tape is not None:
        return tape
    raise UnsupportedCacheError(
        f"The target keeps a {kind.__name__} for a {type(layer).__name__}, from which this version "
        "cannot remove rejected drafts: choose another target."
    )


def _tape(cache: Any, layer: nn.Module, overrides: Overrides) -> Rollback | None:
    """The tape of a cache whose rows cannot be removed; None where there is none.

    Imported when such a cache turns up: Python 3.10 has mlx-lm 0.31 at most, which serves the
    other families and lacks what the tapes build on. Raises `UnsupportedCacheError` there.
    """
    recurrent = type(cache) is ArraysCache and hasattr(layer, "linear_attn")
    if not recurrent and type(cache).__module__ != "mlx_lm.models.deepseek_v41":
        return None
    try:
        from .compressed import CompressedTape, LayerCache
        from .recurrent import RecurrentTape, has_tape
    except ImportError as error:
        raise UnsupportedCacheError(
            f"Drafting for a {type(layer).__name__} needs mlx-lm 0.32 or newer, and so Python 3.11."
        ) from error
    if type(cache) is LayerCache:
        return CompressedTape(cache, layer, overrides)
    return RecurrentTape(cache, layer.linear_attn, overrides) if has_tape(layer) else None
