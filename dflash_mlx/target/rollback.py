"""Removing rejected rows from the target's caches: one function per cache kind.

A verify forward appends N rows to every cache; the commit keeps the first `kept` of them. Which
function serves a layer is decided once, when the request starts, by the exact type of its cache:
a subclass may store its rows differently, and an unknown kind is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache

from ..errors import UnsupportedCacheError

Rollback = Callable[[Any, int], None]


def trim_rows(cache: KVCache, rejected: int) -> None:
    """Forget the last `rejected` rows of a plain KV cache; the next rows overwrite them."""
    cache.trim(rejected)


def rollback_for(cache: Any) -> Rollback:
    """The function that takes rejected rows out of this cache. Raises `UnsupportedCacheError`."""
    if type(cache) is KVCache:
        return trim_rows
    raise UnsupportedCacheError(
        f"The target uses a {type(cache).__name__}, from which rejected drafts cannot be removed "
        "by this version: choose a target with plain KV caches."
    )
