"""A target's KV caches: what each kind of them can do, in one table.

A cache consists of *rows*, one per token, and *state*, which is valid at one position only: a
sliding window or a recurrent state. Rows can be sliced by token and concatenated. A cache with
state can only go back to a *checkpoint*, which holds the old arrays by reference.

A family whose caches are special adds a row to `KINDS`, with functions for what is special. The
exact type of a cache decides, for a subclass may store its rows differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..validation import brief, is_integer
from .internals import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    attention_of,
    cut_ring,
    end_of_ring,
    fields,
    fill_window,
    has_sinks,
    head_size,
    is_mla,
    make_prompt_cache,
    window_of,
)
from .overrides import Overrides
from .recurrent import record_recurrence, recurrent_rollback

Arrays = dict[str, mx.array]

GROUP_SIZES = (64, 32)  # of quantized keys and values; the first that divides the head size


@dataclass(frozen=True)
class CacheKind:
    """What is special about one class of caches. The functions get a cache of that class.

    The defaults are those of an unknown class: all its fields are a state, and nothing but a
    checkpoint brings it back.

    Attributes:
        cut: removes the last rows, if these are rows of the last verify.
        write: writes rows of a tree over the first of the last `rows`: (cache, keys, values, rows).
            None for a class that cannot read trees.
        held: the older rows that a verify's rows may see, and the window, if there is one.
        rollback: makes the rollback of a cache without rows: (cache, layer); None for a layer that
            it does not know.
        record: has a layer's modules record a verify's rows: (layer, overrides, rollbacks,
            kernels). `rollbacks` returns those of the requests in the running forward, `kernels`
            are those of exact decoding, if it is on.
        trims: whether any last rows can be cut, so that there is no state.
        is_plain: whether keys and values are arrays that a batch may keep in slots, or quantize.
        has_keys: whether it has keys at all.
        rows: lazy slices of tokens `start` to `end`, by name: (cache, start, end).
        state: the state by name, of a class that does not trim.
        restore: fills an empty cache: (cache, position, rows, state, room), see `restore_all`.
    """

    cut: Callable[[Any, int], object] | None = None
    write: Callable[[Any, mx.array, mx.array, int], None] | None = None
    held: Callable[[Any], tuple[int, int | None]] = lambda cache: (cache.offset, None)
    rollback: Callable[[Any, nn.Module], Any] | None = None
    record: Callable[[nn.Module, Overrides, Callable[[], Sequence[Any]], Any], None] | None = None
    trims: bool = False
    is_plain: bool = False
    has_keys: bool = True
    rows: Callable[[Any, int, int], Arrays] = lambda *_: {}
    state: Callable[[Any], Arrays] = lambda cache: _state_of_fields(cache)
    restore: Callable[[Any, int, Sequence[Arrays], Arrays, int], None] = (
        lambda cache, position, rows, state, room: _restore_fields(cache, state)
    )


def kind_of(cache: Any) -> CacheKind:
    """What a cache can do."""
    return KINDS.get(type(cache), UNKNOWN)


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
    """The quantized form of a layer's cache; a recurrent layer's has no keys and stays."""
    kind, attention = kind_of(cache), attention_of(layer)
    if not kind.has_keys:
        return cache
    if not kind.is_plain or is_mla(layer):
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
    return all(kind_of(one).trims for _, one in leaves([cache]))


def trim(cache: Any, rows: int) -> None:
    """Forget the last rows of a cache that can be trimmed."""
    for _, one in leaves([cache]):
        one.trim(rows)


def checkpoint(caches: Sequence[Any], position: int) -> Checkpoint:
    """Save the state of these caches. It stays valid whatever is appended to them."""
    states = (None if kind_of(one).trims else _saved(one) for _, one in leaves(caches))
    return Checkpoint(position, tuple(states))


def rewind(caches: Sequence[Any], position: int, saved: Checkpoint) -> None:
    """Put caches of `position` tokens back to a checkpoint."""
    for (_, cache), state in zip(leaves(caches), saved.states, strict=True):
        if state is None:
            trim(cache, position - saved.position)
        else:
            fields(cache).update({name: _reference(value) for name, value in state.items()})


@dataclass(frozen=True)
class Checkpoint:
    """The caches after `position` tokens; the state of a cache that can be trimmed is None."""

    position: int
    states: tuple[dict[str, Any] | None, ...]


def arrays(cache: Any) -> list[Any]:
    """A cache's own fields: arrays, trees of arrays and numbers. Nothing is copied."""
    return [value for _, one in leaves([cache]) for value in fields(one).values()]


def _saved(cache: Any) -> dict[str, Any]:
    """A cache's own fields: arrays, lists of arrays, and positions."""
    return {
        name: _reference(value)
        for name, value in fields(cache).items()
        if value is None or isinstance(value, mx.array | int | list)
    }


def _reference(value: Any) -> Any:
    """A reference that an assignment to the array's rows, or to the list, does not change."""
    if isinstance(value, list):
        return [*value]
    return value[...] if isinstance(value, mx.array) else value


# Exporting


def rows_of_all(caches: Sequence[Any], start: int, end: int) -> Arrays:
    """The rows of the tokens from `start` to `end`, as lazy slices by name."""
    found = ((prefix, kind_of(one).rows(one, start, end)) for prefix, one in leaves(caches))
    return {prefix + name: x for prefix, rows in found for name, x in rows.items()}


def state_of_all(caches: Sequence[Any]) -> Arrays:
    """The states at the caches' own position, by name; none of a cache that can be trimmed."""
    with_state = ((prefix, one) for prefix, one in leaves(caches) if not kind_of(one).trims)
    found = ((prefix, kind_of(one).state(one)) for prefix, one in with_state)
    return {prefix + name: x for prefix, state in found for name, x in state.items()}


def restore_all(
    caches: Sequence[Any], position: int, rows: Sequence[Arrays], state: Arrays, room: int
) -> None:
    """Fill empty caches with `position` tokens. The given arrays are not shared with them.

    Args:
        caches: the empty caches.
        position: tokens.
        rows: results of `rows_of_all`, in order, up to the position.
        state: the result of `state_of_all` at the position.
        room: tokens that are about to follow.
    """
    for prefix, cache in leaves(caches):
        pieces = [strip_prefix(piece, prefix) for piece in rows]
        own = strip_prefix(state, prefix)
        kind_of(cache).restore(cache, position, pieces, own, room)


def strip_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with the prefix, by the rest of their names."""
    return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}


# What is special about kinds


def _state_of_fields(cache: Any) -> Arrays:
    """All fields that hold something."""
    return {name: mx.array(x) for name, x in _saved(cache).items() if x is not None}


def _restore_fields(cache: Any, state: Arrays) -> None:
    numbers = {name for name, value in fields(cache).items() if isinstance(value, int)}
    fields(cache).update({n: x.item() if n in numbers else x[...] for n, x in state.items()})


def _rows(cache: KVCache | QuantizedKVCache, start: int, end: int) -> Arrays:
    """Rows of keys and values [1, H, N, D]; quantized ones have three arrays each."""
    found: Arrays = {}
    for name in ("keys", "values"):
        value = fields(cache)[name]
        if isinstance(value, mx.array):
            found[name] = value[..., start:end, :]
        else:
            found |= {f"{name}.{at}": part[..., start:end, :] for at, part in enumerate(value)}
    return found


def _restore_rows(
    cache: Any, position: int, rows: Sequence[Arrays], state: Arrays, room: int
) -> None:
    """One copy of the rows, followed by room in steps of the cache's own."""
    more = -(-(position + room) // cache.step) * cache.step - position

    def joined(name: str) -> mx.array:
        pieces = [piece[name] for piece in rows if name in piece]
        shape = pieces[0].shape
        empty = mx.zeros((*shape[:2], more, shape[3]), pieces[0].dtype)
        return mx.concatenate([*pieces, empty], axis=2)

    for name in ("keys", "values"):
        parts = tuple(f"{name}.{at}" for at in range(3))
        quantized = parts[0] in rows[0]
        fields(cache)[name] = tuple(map(joined, parts)) if quantized else joined(name)
    cache.offset = position


def _state_of_window(cache: RotatingKVCache) -> Arrays:
    return dict(zip(("keys", "values"), window_of(cache), strict=True))


def _restore_window(
    cache: RotatingKVCache, position: int, rows: object, state: Arrays, room: int
) -> None:
    fill_window(cache, position, state["keys"][...], state["values"][...])


def _state_of_arrays(cache: ArraysCache) -> Arrays:
    return {str(at): x for at, x in enumerate(cache.cache) if x is not None}


def _restore_arrays(
    cache: ArraysCache, position: int, rows: object, state: Arrays, room: int
) -> None:
    for name, x in state.items():
        cache[int(name)] = x[...]


def _write_rows(cache: KVCache, keys: mx.array, values: mx.array, rows: int) -> None:
    to = slice(cache.offset - rows, cache.offset - rows + keys.shape[2])
    cache.keys[..., to, :], cache.values[..., to, :] = keys, values


def _write_quantized(cache: QuantizedKVCache, keys: mx.array, values: mx.array, rows: int) -> None:
    to = slice(cache.offset - rows, cache.offset - rows + keys.shape[2])
    for held, new in ((cache.keys, keys), (cache.values, values)):
        parts = mx.quantize(new, group_size=cache.group_size, bits=cache.bits)
        for held_part, part in zip(held, parts, strict=True):
            held_part[..., to, :] = part


def _write_window(cache: RotatingKVCache, keys: mx.array, values: mx.array, rows: int) -> None:
    to = slice(end_of_ring(cache) - rows, end_of_ring(cache) - rows + keys.shape[2])
    cache.keys[..., to, :], cache.values[..., to, :] = keys, values


def _held_by_window(cache: RotatingKVCache) -> tuple[int, int]:
    return min(cache.offset, cache.max_size - 1), cache.max_size


UNKNOWN = CacheKind()
KINDS: dict[type, CacheKind] = {
    KVCache: CacheKind(
        KVCache.trim, _write_rows, trims=True, is_plain=True, rows=_rows, restore=_restore_rows
    ),
    QuantizedKVCache: CacheKind(
        QuantizedKVCache.trim, _write_quantized, trims=True, rows=_rows, restore=_restore_rows
    ),
    ChunkedKVCache: CacheKind(ChunkedKVCache.trim),
    # Its own `trim` refuses once the window has wrapped.
    RotatingKVCache: CacheKind(
        cut_ring,
        _write_window,
        _held_by_window,
        state=_state_of_window,
        restore=_restore_window,
    ),
    ArraysCache: CacheKind(
        rollback=recurrent_rollback,
        record=record_recurrence,
        has_keys=False,
        state=_state_of_arrays,
        restore=_restore_arrays,
    ),
}
