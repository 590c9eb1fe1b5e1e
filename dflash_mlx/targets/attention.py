"""The attention of a verify through our kernel, whatever the family.

In mlx-lm every attention layer calls `scaled_dot_product_attention` by a global name of its module.
Setting that name would reach every model in the process, and overriding each family's `__call__`
would copy it, once a family. So an attention layer runs *its own* code for the length of a verify
with that one name bound to our function: same bytecode, other globals. Like every override it is
installed on the instances of one target, by `Overrides`, and leaves nothing behind.

The price is that the layer has to call attention under that name; one that does not, or that keeps
what the kernel cannot read (MLA's latents), stays with the stock function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..kernels.block_attention import HEAD_DIMS, BlockAttention, Tree
from ..kernels.choose import attention_from
from ..kernels.modules import Wiring
from ..kernels.shapes import AttentionShape, attention_key, dtype_of, key_over
from ..kernels.weights import AffineWeights
from .caches import GROUP_SIZES, make_cache
from .internals import (
    ATTENTION,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    attention_of,
    has_key_projection,
    has_sinks,
    head_size,
    in_temporal_order,
    is_mla,
    key_heads,
    query_heads,
    scaled_dot_product_attention,
)
from .overrides import Overrides, rebound


def attend_with(wiring: Wiring, layers: Sequence[nn.Module], overrides: Overrides) -> None:
    """Have the attention layers of a model use the kernel while `overrides` is installed."""
    for layer in layers:
        attention = attention_of(layer)
        if attention is not None and calls_attention(attention) and not is_mla(layer):
            call = rebound(type(attention).__call__, **{ATTENTION: attention_with(wiring)})
            overrides.replace(attention, call)


def check_exact(layers: Sequence[nn.Module], caches: Sequence[Any]) -> None:
    """Raise `SettingsError` for a layer whose attention the kernel cannot compute."""
    for layer, cache in zip_longest(layers, caches):  # shared keys and values: fewer caches
        if not _can_be_exact(layer, cache):
            raise SettingsError(
                f"exact: the attention of {type(layer.self_attn).__name__} has no kernel whose "
                "rows are independent; leave exact out."
            )


def attends_exactly(model: Any) -> bool:
    """Whether the kernel can compute the attention of every layer of an mlx-lm model."""
    caches = make_cache(model)
    return all(_can_be_exact(*of) for of in zip_longest(model.layers, caches))


def attention_shape(layer: nn.Module, cache: Any) -> AttentionShape | None:
    """What a layer would ask of the kernel; None where its attention stays with MLX."""
    attention = attention_of(layer)
    if attention is None or is_mla(layer) or not calls_attention(attention):
        return None
    if not has_key_projection(attention) or head_size(attention) not in HEAD_DIMS:
        return None
    heads, size = query_heads(attention), head_size(attention)
    sinks = has_sinks(attention)
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    groups = (group for group in GROUP_SIZES if size % group == 0)
    group = None if sinks or window else next(groups, None)
    dtype = dtype_of(attention.k_proj)
    return AttentionShape(heads, key_heads(attention), size, dtype, window, sinks, group)


def _can_be_exact(layer: nn.Module, cache: Any) -> bool:
    attention = attention_of(layer)
    if attention is None:  # a recurrent layer: see `recurrent`
        return True
    plain = type(cache) is KVCache or (type(cache) is RotatingKVCache and not cache.keep)
    known = plain and calls_attention(attention) and has_key_projection(attention)
    return known and head_size(attention) in HEAD_DIMS


def calls_attention(attention: nn.Module) -> bool:
    """Whether this layer's own code calls attention by the name that is bound anew."""
    call = type(attention).__call__
    return isinstance(call, FunctionType) and ATTENTION in call.__code__.co_names


def attention_with(wiring: Wiring) -> Callable[..., mx.array]:
    """What stands for mlx-lm's function: the kernel where the table says so."""
    kernel = wiring.kernels.attention

    def attend(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend with queries [1, H, N, D], as mlx-lm's `scaled_dot_product_attention` does."""
        _, heads, rows, head_dim = queries.shape
        first: int | None = 1
        if not wiring.exact:
            shape = (heads, _key_heads(keys), head_dim)
            first = attention_from(wiring.chip, *shape, wiring.measured)
            if wiring.broken and _key(shape, cache) in wiring.broken:
                first = None
        if first is None or rows < first or not _readable(queries, cache, mask):
            return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
        return _with_kernel(kernel, queries, keys, values, cache, scale, mask, sinks)

    return attend


def _key(shape: tuple[int, int, int], cache: Any) -> str:
    """The name of the kernel that reads a cache."""
    bits = cache.bits if isinstance(cache, QuantizedKVCache) else None
    return key_over(attention_key(*shape), bits)


def _readable(queries: mx.array, cache: Any, mask: Any) -> bool:
    """Whether the kernel can attend to what this cache holds under this mask."""
    if queries.shape[0] != 1 or queries.shape[3] not in HEAD_DIMS:
        return False
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        return False
    if isinstance(cache, RotatingKVCache):
        return not cache.keep and queries.shape[2] <= cache.max_size
    return isinstance(cache, KVCache | QuantizedKVCache)


def _with_kernel(
    kernel: BlockAttention,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attend to a cache that has just taken the rows of the queries."""
    window = None
    if isinstance(cache, RotatingKVCache):
        window = cache.max_size
        keys, values = _in_order(cache, keys), _in_order(cache, values)
    elif isinstance(cache, QuantizedKVCache):
        keys, values = _affine(cache, *keys), _affine(cache, *values)
    first = cache.offset - keys.shape[2]
    tree = _tree(mask, cache.offset - queries.shape[2]) if isinstance(mask, mx.array) else None
    return kernel(
        queries, keys, values, scale=scale, first=first, window=window, sinks=sinks, tree=tree
    )


def _affine(
    cache: QuantizedKVCache, words: mx.array, scales: mx.array, biases: mx.array
) -> AffineWeights:
    return AffineWeights(words, scales, biases, cache.bits, cache.group_size)


def _in_order(cache: RotatingKVCache, rows: mx.array) -> mx.array:
    """A sliding window's rows by position: a step of one row leaves them as a ring."""
    return rows if cache.offset <= rows.shape[2] else in_temporal_order(cache, rows)


def _tree(mask: mx.array, past: int) -> Tree:
    """The tree that a mask [..., N, K] lets its last N columns see; a chain is one too.

    A node's depth is the number of its ancestors.
    """
    nodes = mask.shape[-2]
    ancestors = mask.reshape(nodes, -1)[:, -nodes:]
    return Tree(past - 1 + ancestors.sum(axis=-1), ancestors)


def _key_heads(keys: Any) -> int:
    """KV of keys [1, KV, L, D], or of the parts of quantized ones."""
    return int((keys[0] if isinstance(keys, tuple | list) else keys).shape[1])
