"""The layers of a draft network: attention over context and block, and Qwen3's MLP.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3 import MLP

from ..targets.caches import FullCache
from .config import DraftConfig
from .rope import make_rope

Sublayer = Callable[[mx.array], mx.array]
# A layer's context: keys and values of committed tokens, in a `FullCache`, or a `WindowCache` if it
# has a sliding window.
ContextCache = Any

# A module is a dict of its parts, and MLX's own layers look them up by key: that is faster than by
# attribute.


def append_rows(
    cache: ContextCache, keys: mx.array, values: mx.array, block: int
) -> tuple[mx.array, mx.array]:
    """Append new context rows and, after them, the rows of a block, which are not kept.

    A layer with a sliding window keeps the last `window - 1` rows: the first row of the next block
    sees no further back (`query position - key position < window`).

    Args:
        cache: the cache of one layer; its `offset` counts the context rows so far.
        keys, values: [1, KV, S + block, head_dim], the S new context rows first.
        block: how many of the last rows belong to the block.

    Returns:
        The keys and values held before, the new ones and the block's,
        [1, KV, held + S + block, head_dim]; they stay valid after the block is forgotten.
    """
    if isinstance(cache, FullCache):
        keys, values = cache.update_and_fetch(keys, values)
        cache.trim(block)
        return keys, values
    position = cache.offset + keys.shape[2] - block
    if cache.offset:
        older_keys, older_values = cache.window()
        keys = mx.concatenate([older_keys, keys], axis=2)
        values = mx.concatenate([older_values, values], axis=2)
    end = keys.shape[2] - block
    start = max(0, end - (cache.max_size - 1))
    cache.fill(position, keys[:, :, start:end], values[:, :, start:end])
    return keys, values


class Attention(nn.Module):
    """Attention of a block over the context rows and over itself."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        head_dim = config.head_dim
        bias = config.attention_bias
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.window = config.windows[layer]
        self.causal = config.causal[layer]
        self.q_proj = nn.Linear(hidden, self.heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        if config.sinks[layer]:
            self.attention_sink_bias = mx.zeros((self.heads,))
        self.rope = make_rope(config)

    def queries(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotated queries [N, H, L, head_dim] of x [N, L, D], whose first row is at `offset`.

        `offset` is a position, or one per batch row as an integer array [N].
        """
        queries = self["q_proj"](x).reshape(*x.shape[:2], self.heads, self.head_dim)
        return self["rope"](self["q_norm"](queries).transpose(0, 2, 1, 3), offset=offset)

    def keys_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Rotated keys and values, each [N, KV, L, head_dim], of x [N, L, D] at `offset`."""
        keys = self["k_proj"](x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
        values = self["v_proj"](x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self["rope"](self["k_norm"](keys).transpose(0, 2, 1, 3), offset=offset)
        return keys, values.transpose(0, 2, 1, 3)

    def __call__(self, x: mx.array, context: mx.array, cache: ContextCache) -> mx.array:
        """Attend from the block x [1, B, D]; the cache keeps the new `context` [1, S, D].

        Returns the heads' outputs before the output projection, [1, H, B, head_dim].
        """
        block = x.shape[1]
        start = cache.offset
        rows = mx.concatenate([context, x], axis=1) if context.shape[1] else x
        keys, values = append_rows(cache, *self.keys_values(rows, start), block=block)
        return self.attend(self.queries(x, cache.offset), keys, values)

    def output(self, heads: mx.array) -> mx.array:
        """Project the heads' outputs [N, H, L, head_dim] to the attention's output [N, L, D]."""
        return self["o_proj"](heads.transpose(0, 2, 1, 3).flatten(2))

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Compute the heads' outputs [1, H, B, head_dim] of a block, whose keys come last."""
        needs_mask = self.causal or self.window is not None
        return mx.fast.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=self.scale,
            mask=self._mask(queries.shape[2], keys.shape[2]) if needs_mask else None,
            # A logit per head [H] in every softmax's denominator, as gpt-oss has it.
            sinks=self.get("attention_sink_bias"),
        )

    def _mask(self, block: int, keys: int) -> mx.array | str | None:
        """Which of `keys` (the block's own `block` rows last) each row of the block may see.

        A window counts from the query's own position; without causality the block sees all of
        itself. Returns None (everything), "causal", or booleans [block, keys].
        """
        if self.window is None or keys <= self.window:
            return "causal" if self.causal else None
        query = mx.arange(keys - block, keys)[:, None]
        key = mx.arange(keys)[None]
        near = query - key < self.window
        return near & (key <= query) if self.causal else near | (key >= keys - block)


class DraftLayer(nn.Module):
    """One decoder layer: attention over context and block, then the MLP."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, attend: Sublayer, places: mx.array | None = None) -> mx.array:
        """The layer's output [N, L, D] from its input x [N, L, D].

        Args:
            x: the rows.
            attend: makes the heads' outputs [N, H, L, head_dim] of the attention's input; it reads
                a cache when drafting, whole texts in training.
            places: [L], each row's place in its block, if x holds several blocks.
        """
        x = x + self["self_attn"].output(attend(self["input_layernorm"](x)))
        return x + self["mlp"](self["post_attention_layernorm"](x))


class DynamicConv(nn.Module):
    """Causal convolutions along the block, of a sub-layer's input and of its output (DFlash2).

    Their kernels depend on each row's own hidden state, and groups of channels share them.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        kernel = config.conv_kernel_size
        self.groups = hidden // config.conv_group_size
        # Before training, every row passes through unchanged.
        self.base_kernel = mx.zeros((2, kernel, hidden))
        self.base_kernel[:, 0] = 1
        self.kernel_projection = nn.Linear(hidden, 2 * kernel * self.groups, bias=False)
        self.kernel_projection.weight = mx.zeros_like(self.kernel_projection.weight)

    def __call__(self, x: mx.array, sublayer: Sublayer, places: mx.array | None = None) -> mx.array:
        """x [N, L, D] -> convolve -> sub-layer -> convolve; both kernels depend on x."""
        sides, kernel, hidden = self.base_kernel.shape
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], sides, kernel, self.groups, 1)
        static = self.base_kernel.reshape(sides, kernel, self.groups, -1)
        kernels = (static + dynamic).flatten(-2)  # [N, L, 2, kernel, D]
        within = convolve(x, kernels[:, :, 0], places)
        return convolve(sublayer(within), kernels[:, :, 1], places)


def convolve(x: mx.array, kernels: mx.array, places: mx.array | None = None) -> mx.array:
    """out[i] = sum_t kernels[i, t] * x[i - t], zero before the block's first row.

    x is [N, L, D]; kernels [N, L, K, D] hold a kernel per row and channel; places [L] are the rows'
    places in their blocks, if x holds several blocks.
    """
    length = x.shape[1]
    out = kernels[:, :, 0] * x
    for back in range(1, min(kernels.shape[2], length)):
        earlier = mx.pad(x[:, : length - back], [(0, 0), (back, 0), (0, 0)])
        if places is not None:
            earlier = mx.where((places < back)[:, None], 0, earlier)
        out = out + kernels[:, :, back] * earlier
    return out


class ConvolvedLayer(DraftLayer):
    """A DFlash layer with a convolution around each of its halves."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def __call__(self, x: mx.array, attend: Sublayer, places: mx.array | None = None) -> mx.array:
        """Compute the layer's output [N, L, D]. The arguments are those of `DraftLayer`."""

        def attention(inputs: mx.array) -> mx.array:
            return self.self_attn.output(attend(inputs))

        x = x + self.attention_conv(self.input_layernorm(x), attention, places)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp, places)
