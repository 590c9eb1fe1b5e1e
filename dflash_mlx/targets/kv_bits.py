"""A request's caches, and keeping keys and values in 8 or 4 bits where the model can read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from ..errors import SettingsError
from ..validation import brief, is_integer
from .internals import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    attention_of,
    has_sinks,
    head_size,
    is_mla,
    make_prompt_cache,
)

GROUP_SIZES = (64, 32)  # of mlx's quantization, the first that divides the head size is taken


def make_cache(
    model: nn.Module, layers: Sequence[nn.Module] = (), kv_bits: int | None = None
) -> list[Any]:
    """The model's empty caches, one per layer (fewer where layers share them).

    Raises `SettingsError` when `kv_bits` is not 8, 4 or None, or for a model one of whose layers
    cannot read quantized keys and values.
    """
    caches: list[Any] = make_prompt_cache(model)
    check_bits(kv_bits)
    if kv_bits is None:
        return caches
    bits = int(kv_bits)
    return [_quantized(cache, layer, bits) for cache, layer in zip(caches, layers, strict=False)]


def check_bits(kv_bits: int | None) -> None:
    """Raise `SettingsError` when they are not 8, 4 or None."""
    if kv_bits is not None and not (is_integer(kv_bits) and kv_bits in (8, 4)):
        raise SettingsError(f"Keys and values are kept in 8 or 4 bits, not {brief(kv_bits)}.")


def _quantized(cache: Any, layer: nn.Module, bits: int) -> Any:
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
