"""Gemma 4's layers in a draft network: DeepSpec's DFlash, DSpark and EAGLE-3 for Gemma 4.

They follow the target's full-attention layers: wide heads, a quarter of which turns, values that
are normed and may be the keys, scores that are not scaled, and norms before and after each part.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import geglu
from mlx_lm.models.qwen3 import MLP

from .config import DraftConfig
from .layers import Attention, DraftLayer, Sublayer


class Gemma4Attention(Attention):
    """Attention whose values are normed, and may be the keys before the keys' norm."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = 1.0
        self.eps = config.rms_norm_eps
        if config.keys_are_values:
            del self["v_proj"]

    def keys_values(self, x: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Compute rotated keys and normed values, in the shapes of `Attention`."""
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        keys = self["k_proj"](x).reshape(shape)
        values = self["v_proj"](x).reshape(shape) if "v_proj" in self else keys
        values = mx.fast.rms_norm(values, None, self.eps).transpose(0, 2, 1, 3)
        return self["rope"](self["k_norm"](keys).transpose(0, 2, 1, 3), offset=offset), values


class Gemma4MLP(MLP):
    """A gated MLP with GELU."""

    def __call__(self, x: mx.array) -> mx.array:
        """Outputs [N, L, D] of x [N, L, D]."""
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class Gemma4Layer(DraftLayer):
    """A decoder layer with norms before and after both parts, and a factor on its output."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.self_attn = Gemma4Attention(config, layer)
        self.mlp = Gemma4MLP(config.hidden_size, config.intermediate_size)
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            self[name] = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, attend: Sublayer, places: mx.array | None = None) -> mx.array:
        """Compute the layer's output [N, L, D]. The arguments are those of `DraftLayer`."""
        attended = self["self_attn"].output(attend(self["input_layernorm"](x)))
        x = x + self["post_attention_layernorm"](attended)
        transformed = self["mlp"](self["pre_feedforward_layernorm"](x))
        return (x + self["post_feedforward_layernorm"](transformed)) * self["layer_scalar"]
