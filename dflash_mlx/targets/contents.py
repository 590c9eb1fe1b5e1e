"""What a cache consists of, as arrays that can be stored apart and put together again.

*Rows* belong to tokens: those of any stretch of the text can be taken out, and laid behind others.
What has no row per token, a sliding window or a recurrent state, is the *state* at a position, and
only good there. A cache is both together, by names that are the cache's own fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from .internals import (
    ArraysCache,
    CacheList,
    KVCache,
    LayerCache,
    QuantizedKVCache,
    RotatingKVCache,
    attention_of,
    compression,
    fields,
    fill_window,
    window_of,
)

Arrays = dict[str, mx.array]
ENTRIES = ("compress_kv", "index_k")  # of a DeepSeek-V4.1 layer, one for every `ratio` tokens
OPEN = ("window", "pending_kv", "pending_gate")  # of it: what is not in an entry yet


def rows_of_all(caches: Sequence[Any], layers: Sequence[Any], start: int, end: int) -> Arrays:
    """`rows` of every layer's cache, by the number of the layer and the name."""
    return {
        f"{at}.{name}": x
        for at, (cache, layer) in enumerate(zip(caches, layers, strict=False))
        for name, x in rows(cache, start, end, compression(attention_of(layer))).items()
    }


def state_of_all(caches: Sequence[Any]) -> Arrays:
    """`state` of every layer's cache, by the number of the layer and the name."""
    return {
        f"{at}.{name}": x for at, cache in enumerate(caches) for name, x in state(cache).items()
    }


def fill_all(
    caches: Sequence[Any], position: int, rows: Sequence[Arrays], state: Arrays, room: int
) -> None:
    """`fill` every layer's cache, from what `rows_of_all` and `state_of_all` gave."""
    for at, cache in enumerate(caches):
        pieces = [inside(piece, f"{at}.") for piece in rows]
        fill(cache, position, pieces, inside(state, f"{at}."), room)


def rows(cache: Any, start: int, end: int, ratio: int = 0) -> Arrays:
    """The rows of the tokens from `start` to `end`, as slices that nothing has computed yet.

    Args:
        cache: a layer's, past `end`.
        ratio: tokens to an entry, of a DeepSeek-V4.1 layer; 0 for one that has none.
    """
    kind = type(cache)
    if kind is CacheList:
        return {
            f"{at}.{name}": x
            for at, part in enumerate(cache.caches)
            for name, x in rows(part, start, end).items()
        }
    if kind is KVCache or kind is QuantizedKVCache:
        return {name: x[..., start:end, :] for name, x in _keys_values(cache)}
    if kind is LayerCache and ratio and start // ratio < end // ratio:
        entries = {name: fields(cache)[name] for name in ENTRIES}
        return {n: x[:, start // ratio : end // ratio] for n, x in entries.items() if x is not None}
    return {}


def state(cache: Any) -> Arrays:
    """What is good at the cache's own position alone; empty for one that can be cut anywhere."""
    kind = type(cache)
    if kind is RotatingKVCache:
        return dict(zip(("keys", "values"), window_of(cache), strict=True))
    if kind is ArraysCache:
        return {str(at): x for at, x in enumerate(cache.cache) if x is not None}
    if kind is LayerCache:
        held = {name: fields(cache)[name] for name in OPEN}
        return {name: x for name, x in held.items() if x is not None and x.size}
    return {}


def fill(cache: Any, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
    """Make an empty cache one of `position` tokens. Nothing is shared with what it is made of.

    Args:
        rows: of the tokens before `position`, stretch after stretch.
        state: of that position.
        room: tokens that are about to follow.
    """
    kind = type(cache)
    if kind is CacheList:
        for at, part in enumerate(cache.caches):
            fill(part, position, [inside(piece, f"{at}.") for piece in rows], {}, room)
    elif kind is KVCache or kind is QuantizedKVCache:
        _fill_rows(cache, position, rows, room)
    elif kind is RotatingKVCache:
        fill_window(cache, position, state["keys"][...], state["values"][...])
    elif kind is ArraysCache:
        for name, x in state.items():
            cache[int(name)] = x[...]
    elif kind is LayerCache:
        held = {name: state[name][...] for name in OPEN if name in state}
        for name in ENTRIES:
            pieces = [piece[name] for piece in rows if name in piece]
            if pieces:
                held[name] = mx.concatenate(pieces, axis=1)
        fields(cache).update(held, offset=position)


def inside(arrays: Arrays, prefix: str) -> Arrays:
    """Those whose name begins so, without that beginning."""
    return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}


def _keys_values(cache: KVCache | QuantizedKVCache) -> Iterator[tuple[str, mx.array]]:
    """The arrays [1, H, N, D] of a cache with rows; quantized, keys and values have three each."""
    for name in ("keys", "values"):
        value = fields(cache)[name]
        if isinstance(value, mx.array):
            yield name, value
        else:
            yield from ((f"{name}.{at}", part) for at, part in enumerate(value))


def _fill_rows(
    cache: KVCache | QuantizedKVCache, position: int, rows: Sequence[Arrays], room: int
) -> None:
    """One copy: rows and, behind them, room in steps of the cache's own."""
    more = -(-(position + room) // cache.step) * cache.step - position

    def joined(name: str) -> mx.array:
        pieces = [piece[name] for piece in rows if name in piece]
        shape = pieces[0].shape
        empty = mx.zeros((*shape[:2], more, shape[3]), pieces[0].dtype)
        return mx.concatenate([*pieces, empty], axis=2)

    for name in ("keys", "values"):
        quantized = type(cache) is QuantizedKVCache
        parts = (f"{name}.{at}" for at in range(3))
        fields(cache)[name] = tuple(map(joined, parts)) if quantized else joined(name)
    cache.offset = position
