"""Caches of ours, made from the empty ones that mlx-lm's model makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from ...errors import SettingsError
from ...validation import brief, is_integer
from ..internals import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    attention_of,
    has_sinks,
    head_size,
    is_mla,
    make_prompt_cache,
)
from ..recurrences import recurrence_of
from .cache_parts import CacheParts
from .chunked import ChunkedCache
from .generic import generic_class
from .kv import FullCache, QuantizedCache
from .recurrent import RecurrentCache
from .window import WindowCache

# The exact type decides, for a subclass may store its rows differently.
OWN: dict[type, type] = {
    KVCache: FullCache,
    QuantizedKVCache: QuantizedCache,
    RotatingKVCache: WindowCache,
    ChunkedKVCache: ChunkedCache,
}

GROUP_SIZES = (64, 32)  # of quantized keys and values; the first that divides the head size


def make_cache(
    model: nn.Module, layers: Sequence[nn.Module | None], kv_bits: int | None = None
) -> list[Any]:
    """The model's empty caches, a `DraftCache` each; `layers` are those that get them.

    Raises `SettingsError` when `kv_bits` is not 8, 4 or None, or a layer cannot read quantized
    keys and values.
    """
    check_kv_bits(kv_bits)
    caches = make_prompt_cache(model)
    if kv_bits is not None:
        bits = int(kv_bits)
        caches = [
            _quantized(cache, layer, bits) for cache, layer in zip(caches, layers, strict=True)
        ]
    return [own_cache(cache, layer) for cache, layer in zip(caches, layers, strict=True)]


def own_cache(cache: Any, layer: nn.Module | None = None) -> Any:
    """Our form of one of mlx-lm's caches, which is empty; a `DraftCache`.

    Args:
        cache: the cache.
        layer: the decoder layer that gets it: its recurrence decides what an array is.
    """
    kind: type = type(cache)
    if kind is CacheList:
        return CacheParts(*map(own_cache, cache.caches))
    our_class: Any = OWN.get(kind) or generic_class(kind)
    if kind is ArraysCache and recurrence_of(layer) is not None:
        our_class = RecurrentCache
    made = our_class.__new__(our_class)
    vars(made).update(vars(cache))
    return made


def check_kv_bits(kv_bits: int | None) -> None:
    """Raise `SettingsError` unless `kv_bits` is 8, 4 or None."""
    if kv_bits is not None and not (is_integer(kv_bits) and kv_bits in (8, 4)):
        raise SettingsError(f"kv_bits must be 8 or 4, not {brief(kv_bits)}.")


def _quantized(cache: Any, layer: nn.Module | None, bits: int) -> Any:
    """The quantized form of a layer's empty cache; a recurrent layer's has no keys and stays."""
    attention = attention_of(layer)
    if type(cache) is ArraysCache:
        return cache
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
        f"kv_bits: this target's head size {size} is not a multiple of {GROUP_SIZES[-1]}."
    )
