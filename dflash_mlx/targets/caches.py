"""A target's KV caches: making, trimming, checkpointing and exporting them.

A cache consists of *rows*, one per token, and *state*, which is valid at one position only: a
sliding window or a recurrent state. Rows can be sliced by token and concatenated. A cache with
state can only go back to a *checkpoint*, which holds the old arrays by reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..validation import brief, is_integer
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
    has_sinks,
    head_size,
    is_mla,
    make_prompt_cache,
    window_of,
)

Arrays = dict[str, mx.array]

GROUP_SIZES = (64, 32)  # of quantized keys and values; the first that divides the head size
# Fields of a DeepSeek-V4.1 layer's cache: compressed entries, one per `ratio` tokens, and the rest.
ENTRIES = ("compress_kv", "index_k")
OPEN_GROUP = ("window", "pending_kv", "pending_gate")


@dataclass(frozen=True)
class Checkpoint:
    """The caches after `position` tokens; the state of a cache that can be trimmed is None."""

    position: int
    states: tuple[dict[str, Any] | None, ...]


def make_cache(
    model: nn.Module, layers: Sequence[nn.Module | None] = (), kv_bits: int | None = None
) -> list[Any]:
    """The model's empty caches; `layers` are those that get them.

    Raises `SettingsError` when `kv_bits` is not 8, 4 or None, or a layer cannot read quantized
    keys and values.
    """
    caches: list[Any] = make_prompt_cache(model)
    check_kv_bits(kv_bits)
    if kv_bits is None:
        return caches
    bits = int(kv_bits)
    return [_quantized(cache, layer, bits) for cache, layer in zip(caches, layers, strict=True)]


def check_kv_bits(kv_bits: int | None) -> None:
    """Raise `SettingsError` unless `kv_bits` is 8, 4 or None."""
    if kv_bits is not None and not (is_integer(kv_bits) and kv_bits in (8, 4)):
        raise SettingsError(f"kv_bits must be 8 or 4, not {brief(kv_bits)}.")


def _quantized(cache: Any, layer: nn.Module | None, bits: int) -> Any:
    """The quantized form of a layer's cache; a recurrent layer has no keys and keeps its own."""
    if type(cache) is ArraysCache:
        return cache
    attention = attention_of(layer)
    if type(cache) is not KVCache or is_mla(layer):
        what = "MLA latents" if is_mla(layer) else f"a {type(cache).__name__}"
        raise SettingsError(f"kv_bits: this target keeps {what}, which cannot be quantized.")
    if attention is None or has_sinks(attention):
        raise SettingsError("kv_bits: this target's attention sinks need unquantized keys.")
    size = head_size(attention)
    for group_size in GROUP_SIZES:
        if size % group_size == 0:
            return QuantizedKVCache(group_size=group_size, bits=bits)
    raise SettingsError(
        f"kv_bits: this target's head size {size} is no multiple of {GROUP_SIZES[-1]}."
    )


# Going back


def leaves(caches: Sequence[Any]) -> list[tuple[str, Any]]:
    """Every cache under the start of its arrays' names; those in a `CacheList` one by one."""
    found = []
    for at, cache in enumerate(caches):
        if type(cache) is CacheList:
            found += [(f"{at}.{part}.", one) for part, one in enumerate(cache.caches)]
        else:
            found.append((f"{at}.", cache))
    return found


def can_trim(cache: Any) -> bool:
    """Whether a layer's cache holds a row for every token, in order."""
    return all(is_plain_kv(one) for _, one in leaves([cache]))


def is_plain_kv(cache: Any) -> bool:
    """Whether a forward's logits depend on all of a layer's cache, and trimming moves an offset."""
    return type(cache) in (KVCache, QuantizedKVCache)


def trim(cache: Any, rows: int) -> None:
    """Forget the last rows of a cache that can be trimmed."""
    for _, one in leaves([cache]):
        one.trim(rows)


def checkpoint(caches: Sequence[Any], position: int) -> Checkpoint:
    """Save the state of these caches. It stays valid whatever is appended to them."""
    states = (None if is_plain_kv(cache) else _saved(cache) for _, cache in leaves(caches))
    return Checkpoint(position, tuple(states))


def rewind(caches: Sequence[Any], position: int, saved: Checkpoint) -> None:
    """Put caches of `position` tokens back to a checkpoint."""
    for (_, cache), state in zip(leaves(caches), saved.states, strict=True):
        if state is None:
            trim(cache, position - saved.position)
        elif type(cache) is ArraysCache:
            cache.cache = list(state["cache"])
        else:
            fields(cache).update({name: _reference(value) for name, value in state.items()})


def arrays(cache: Any) -> list[Any]:
    """A cache's own fields: arrays, trees of arrays and numbers. Nothing is copied."""
    return [value for _, one in leaves([cache]) for value in fields(one).values()]


def _saved(cache: Any) -> dict[str, Any]:
    """A cache's own fields: arrays, lists of arrays, and positions."""
    if type(cache) is ArraysCache:
        return {"cache": list(cache.cache)}
    return {
        name: _reference(value)
        for name, value in fields(cache).items()
        if value is None or isinstance(value, mx.array | int)
    }


def _reference(value: Any) -> Any:
    """A reference that an assignment to the array's rows does not change."""
    return value[...] if isinstance(value, mx.array) else value


# Exporting


def rows_of_all(
    caches: Sequence[Any], start: int, end: int, layers: Sequence[nn.Module | None] = ()
) -> Arrays:
    """`rows` of every cache; names begin with the cache's number.

    `layers` are those that get the caches, if one may compress its rows.
    """
    ratios = [
        compression(attention_of(layer))
        for cache, layer in zip(caches, layers or [None] * len(caches), strict=True)
        for _ in leaves([cache])
    ]
    return {
        prefix + name: x
        for (prefix, cache), ratio in zip(leaves(caches), ratios, strict=True)
        for name, x in rows(cache, start, end, ratio).items()
    }


def state_of_all(caches: Sequence[Any]) -> Arrays:
    """`state` of every cache; names begin with the cache's number."""
    return {prefix + n: x for prefix, cache in leaves(caches) for n, x in state(cache).items()}


def restore_all(
    caches: Sequence[Any], position: int, rows: Sequence[Arrays], state: Arrays, room: int
) -> None:
    """`restore` every cache from the results of `rows_of_all` and `state_of_all`."""
    for prefix, cache in leaves(caches):
        pieces = [strip_prefix(piece, prefix) for piece in rows]
        restore(cache, position, pieces, strip_prefix(state, prefix), room)


def rows(cache: Any, start: int, end: int, ratio: int = 0) -> Arrays:
    """The rows of the tokens from `start` to `end`, as lazy slices.

    Args:
        cache: a cache, past `end`.
        start, end: token positions.
        ratio: tokens per compressed entry of a DeepSeek-V4.1 layer; 0 for other layers.
    """
    if is_plain_kv(cache):
        return {name: x[..., start:end, :] for name, x in _keys_values(cache)}
    if type(cache) is LayerCache and ratio and start // ratio < end // ratio:
        entries = {name: fields(cache)[name] for name in ENTRIES}
        return {n: x[:, start // ratio : end // ratio] for n, x in entries.items() if x is not None}
    return {}


def state(cache: Any) -> Arrays:
    """The state at the cache's own position; empty for a cache that can be trimmed."""
    kind = type(cache)
    if is_plain_kv(cache):
        return {}
    if kind is RotatingKVCache:
        return dict(zip(("keys", "values"), window_of(cache), strict=True))
    if kind is ArraysCache:
        return {str(at): x for at, x in enumerate(cache.cache) if x is not None}
    held = _saved(cache)
    if kind is LayerCache:
        held = {name: x for name in OPEN_GROUP if (x := held[name]) is not None and x.size}
    return {name: mx.array(x) for name, x in held.items() if x is not None}


def restore(cache: Any, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
    """Fill an empty cache with `position` tokens. The given arrays are not shared with it.

    Args:
        cache: the empty cache.
        position: tokens.
        rows: the tokens' rows, in pieces.
        state: the state at that position.
        room: tokens that are about to follow.
    """
    kind = type(cache)
    if is_plain_kv(cache):
        _restore_rows(cache, position, rows, room)
    elif kind is RotatingKVCache:
        fill_window(cache, position, state["keys"][...], state["values"][...])
    elif kind is ArraysCache:
        for name, x in state.items():
            cache[int(name)] = x[...]
    elif kind is LayerCache:
        held = {name: state[name][...] for name in OPEN_GROUP if name in state}
        for name in ENTRIES:
            pieces = [piece[name] for piece in rows if name in piece]
            if pieces:
                held[name] = mx.concatenate(pieces, axis=1)
        fields(cache).update(held, offset=position)
    else:
        numbers = {name for name, value in fields(cache).items() if isinstance(value, int)}
        fields(cache).update({n: x.item() if n in numbers else x[...] for n, x in state.items()})


def strip_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with the prefix, by the rest of their names."""
    return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}


def _keys_values(cache: KVCache | QuantizedKVCache) -> Iterator[tuple[str, mx.array]]:
    """The arrays [1, H, N, D] of a cache with rows; quantized keys and values have three each."""
    for name in ("keys", "values"):
        value = fields(cache)[name]
        if isinstance(value, mx.array):
            yield name, value
        else:
            yield from ((f"{name}.{at}", part) for at, part in enumerate(value))


def _restore_rows(
    cache: KVCache | QuantizedKVCache, position: int, rows: Sequence[Arrays], room: int
) -> None:
    """One copy of the rows, followed by room in steps of the cache's own."""
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
