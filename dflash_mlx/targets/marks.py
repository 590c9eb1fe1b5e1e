"""Going back to an earlier state of the caches, so that a chat's next turn can go on from there.

Rows of a cache that never drops any are cut off. Sliding windows and recurrent states have lost
what was before them, so a *mark* holds on to the arrays they had: by reference, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .internals import ArraysCache, CacheList, KVCache, QuantizedKVCache, fields


@dataclass(frozen=True)
class Mark:
    """The state of a target's caches after `position` tokens; None for caches that can be cut."""

    position: int
    states: tuple[dict[str, Any] | None, ...]


def can_be_cut(cache: Any) -> bool:
    """Whether a layer's cache still holds a row for every token, in their order."""
    if type(cache) is CacheList:
        return all(map(can_be_cut, cache.caches))
    return type(cache) in (KVCache, QuantizedKVCache)


def is_read_whole(cache: Any) -> bool:
    """Whether a forward's logits need all of a layer's cache, which is then cut by its offset."""
    return type(cache) in (KVCache, QuantizedKVCache)


def cut(cache: Any, rows: int) -> None:
    """Forget the last rows of a cache that can be cut."""
    for part in cache.caches if type(cache) is CacheList else (cache,):
        part.trim(rows)


def mark(caches: Sequence[Any], position: int) -> Mark:
    """The state of these caches now. It stays valid whatever is appended to them."""
    return Mark(position, tuple(None if can_be_cut(cache) else _state(cache) for cache in caches))


def rewind(caches: Sequence[Any], position: int, mark: Mark) -> None:
    """Put caches of `position` tokens back to where they were at the mark."""
    for cache, state in zip(caches, mark.states, strict=True):
        if state is None:
            cut(cache, position - mark.position)
        elif type(cache) is ArraysCache:
            cache.cache = list(state["cache"])
        else:
            fields(cache).update({name: _held(value) for name, value in state.items()})


def arrays(cache: Any) -> list[Any]:
    """A cache's own fields, arrays or trees of them among them; nothing is sliced or copied."""
    parts = cache.caches if type(cache) is CacheList else (cache,)
    return [value for part in parts for value in fields(part).values()]


def _state(cache: Any) -> dict[str, Any]:
    """A cache's own fields: arrays, the lists of them, and positions."""
    if type(cache) is ArraysCache:
        return {"cache": list(cache.cache)}
    return {
        name: _held(value)
        for name, value in fields(cache).items()
        if value is None or isinstance(value, mx.array | int)
    }


def _held(value: Any) -> Any:
    """A reference that an assignment to the array's rows does not change."""
    return value[...] if isinstance(value, mx.array) else value
