"""Attention of a verification through our kernel, for any family.

In mlx-lm every attention layer calls `scaled_dot_product_attention` by a global name of its module.
During a verification the layer's own code runs with that name bound to our function: same bytecode,
other globals. (Setting the global would reach every model in the process; overriding each family's
`__call__` would copy it.)

A layer that does not call attention by that name, or whose cache the kernel cannot read (MLA's
latents), keeps the stock function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..kernels.block_attention import HEAD_DIMS, MOST_NODES, AttentionCall
from ..kernels.choose import attention_rows
from ..kernels.selfcheck import KernelCheckFailed
from ..kernels.shapes import attention_key
from ..kernels.weights import AffineWeights
from ..subclassing import stock_class
from .caches import FullCache, QuantizedCache, WindowCache
from .internals import (
    ATTENTION,
    attention_of,
    has_key_projection,
    head_size,
    is_mla,
    key_heads,
    mixer_of,
    query_heads,
    scaled_dot_product_attention,
)
from .recurrences import GatedDelta, recurrence_of
from .rows import PerRequest, SharedCache

if TYPE_CHECKING:
    from ..kernels.modules import KernelPlan

Pairs = Sequence[tuple[nn.Module | None, Any]]  # layers with their caches


def check_exact(pairs: Pairs) -> None:
    """Raise `SettingsError` for a layer whose attention or recurrence no kernel can compute."""
    for layer, cache in pairs:
        if not _can_be_exact(layer, cache):
            part = attention_of(layer) or mixer_of(layer) or layer
            raise SettingsError(
                f"kernels=exact: {type(part).__name__} has no kernel whose rows are independent; "
                "leave it out."
            )


def attends_exactly(pairs: Pairs) -> bool:
    """Whether kernels can compute the attention or recurrence of every layer."""
    return all(_can_be_exact(layer, cache) for layer, cache in pairs)


def attention_keys(pairs: Pairs) -> list[str]:
    """The name of every layer's attention that the kernel takes, from `attention_key`."""
    return [
        attention_key(query_heads(attention), key_heads(attention), head_size(attention))
        for attention in (attention_of(layer) for layer, _ in pairs if not is_mla(layer))
        if attention is not None and _has_kernel(attention)
    ]


def _has_kernel(attention: nn.Module) -> bool:
    """Whether our kernel can stand in for the attention that this module calls."""
    can_replace = calls_attention(attention) and has_key_projection(attention)
    return can_replace and head_size(attention) in HEAD_DIMS


def _can_be_exact(layer: nn.Module | None, cache: Any) -> bool:
    """Whether kernels can compute a layer's attention or recurrence, if it has one."""
    attention = attention_of(layer)
    if attention is None:
        return cache is None or isinstance(recurrence_of(layer), GatedDelta)
    # A window that keeps the text's first rows is not one range of positions.
    plain_window = isinstance(cache, WindowCache) and not cache.keep
    return (plain_window or isinstance(cache, FullCache)) and _has_kernel(attention)


def calls_attention(attention: nn.Module) -> bool:
    """Whether a layer's own code calls attention by the global name."""
    stock: Any = stock_class(attention)
    call = stock.__call__
    return isinstance(call, FunctionType) and ATTENTION in call.__code__.co_names


def attention_function(kernel_plan: KernelPlan | None) -> Callable[..., mx.array]:
    """What all layers call in place of mlx-lm's function: our kernel where it was chosen."""
    if kernel_plan is None:
        return scaled_dot_product_attention
    kernel = kernel_plan.kernels.attention

    @functools.lru_cache(maxsize=64)  # every layer of a forward asks for the same shape
    def kernel_rows(length: int, *heads: int) -> Container[int]:
        """The numbers of rows for which the kernel was chosen."""
        return attention_rows(kernel_plan.rows, attention_key(*heads), length)

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
        _, key_heads, length, _ = (keys[0] if isinstance(keys, tuple | list) else keys).shape
        is_ours = kernel_plan.exact or rows in kernel_rows(length, heads, key_heads, head_dim)
        if is_ours and _readable(queries, cache, mask):
            try:
                return kernel(_kernel_call(queries, keys, values, cache, scale, sinks))
            except KernelCheckFailed:
                pass  # MLX's own attention follows
        return scaled_dot_product_attention(
            queries,
            keys,
            values,
            cache=cache,
            scale=scale,
            mask=mask,
            sinks=sinks,
        )

    return attend


def _kernel_call(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    sinks: mx.array | None,
) -> AttentionCall:
    """Describe an attention for the kernel, with the cache's rows in the order of their tokens."""
    window = None
    if isinstance(cache, WindowCache):
        window = cache.max_size
        keys = cache.in_order(keys)
        values = cache.in_order(values)
    elif isinstance(cache, QuantizedCache):
        keys = _affine(cache, *keys)
        values = _affine(cache, *values)
    place = getattr(cache, "place", None)
    return AttentionCall(
        queries,
        keys,
        values,
        scale=scale,
        first=cache.offset - keys.shape[2] if place is None else 0,
        window=window,
        sinks=sinks,
        tree=None if cache.tree is None else cache.tree.tree_mask,
        place=place,
    )


def attend_each(
    stock: Callable[..., mx.array],
    queries: mx.array,
    keys: PerRequest,
    values: PerRequest,
    cache: SharedCache | None,
    scale: float,
    mask: PerRequest,
    sinks: mx.array | None = None,
) -> mx.array:
    """Have the attention function `stock` attend for each request.

    Args:
        stock: as `attention_function` returns it.
        queries: [1, H, R, D] of all rows.
        keys, values, mask: of each request.
        cache: None for an earlier layer's keys.
        scale, sinks: as `stock` takes them.

    Returns the outputs [1, H, R, Dv].
    """
    rows = keys.rows
    in_slots = [
        stock(slots.take(queries), slot_keys, slot_values, None, scale, slot_mask, sinks)
        for slots, slot_keys, slot_values, slot_mask in zip(
            rows.slot_rows,  # also where this layer's keys are in no slots: then nothing is zipped
            keys.in_slots,
            values.in_slots,
            mask.in_slots,
            strict=False,
        )
    ]
    numbers = rows.without_slots if in_slots else range(len(rows.spans))
    parts = rows.split(queries, 2) if numbers else []
    outputs = []
    for number in numbers:
        request_cache = None if cache is None else cache.parts[number]
        outputs.append(
            stock(
                parts[number],
                keys.parts[number],
                values.parts[number],
                request_cache,
                scale,
                mask.parts[number],
                sinks,
            )
        )
    return rows.join(in_slots, outputs) if in_slots else mx.concatenate(outputs, axis=2)


def _readable(queries: mx.array, cache: Any, mask: Any) -> bool:
    """Whether the kernel takes these queries, and can read this cache under this mask."""
    batch, _, rows, head_dim = queries.shape
    if batch != 1 or rows > MOST_NODES or head_dim not in HEAD_DIMS:
        return False
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        return False
    if isinstance(cache, WindowCache):
        return not cache.keep
    return isinstance(cache, FullCache | QuantizedCache)


def _affine(
    cache: QuantizedCache, words: mx.array, scales: mx.array, biases: mx.array
) -> AffineWeights:
    return AffineWeights(words, scales, biases, cache.bits, cache.group_size)
