"""EAGLE-3 (arXiv 2503.01840): a small decoder that drafts token by token on its own states.

Taps of the target, three as a rule, are fused into one feature per token. A row of the network has
a token's feature and the embedding of the token after it, side by side; both enter the first
layer's attention, and only the feature enters its residual stream. The features of drafted rows are
the network's own hidden states.

Parameter names are those of Speculators' checkpoints, except for `hidden_norm`.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..targets.caches import FullCache
from .config import DraftConfig
from .dflash import DFlash
from .layers import Attention, DraftLayer
from .stepwise import StepwiseDrafter

if TYPE_CHECKING:
    from ..targets import Target

HEAD_NORM = "layers.0.self_attn.q_norm.weight"  # in heads with Qwen3's layers, not with Llama's


class Eagle3(StepwiseDrafter, DFlash):
    """The EAGLE-3 head. Like a DFlash drafter, it may borrow the target's embedding and head."""

    label = "EAGLE-3"
    block_size = DFlash.block_size

    def __init__(self, config: DraftConfig, parts: Container[str] = ()) -> None:
        super().__init__(config, parts)
        attention = self.layers[0].self_attn
        hidden = config.hidden_size
        # Its input is the embedding and the feature, side by side. Gemma 4's may have no `v_proj`.
        for name in attention.keys() & {"q_proj", "k_proj", "v_proj"}:
            width = attention[name].weight.shape[0]
            attention[name] = nn.Linear(2 * hidden, width, bias=config.attention_bias)
        if HEAD_NORM not in parts:
            for layer in self.layers:
                for name in ("q_norm", "k_norm"):
                    layer.self_attn[name] = nn.Identity()
        eps = config.rms_norm_eps
        width = config.target_hidden_size
        taps = len(config.target_layer_ids)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps * width, eps=eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(width, eps=eps) for _ in range(taps)]

    def make_cache(self) -> list[Any]:
        """Make a full cache per layer. Windows are masks, because drafted rows are trimmed."""
        return [FullCache() for _ in self.layers]

    def fuse(self, taps: mx.array) -> mx.array:
        """Features [N, S, D] from the concatenated taps [N, S, K*Dt]."""
        if "input_norm" in self:
            taps = self.input_norm(taps)
        if "fc_norm" in self:
            by_layer = mx.split(taps, len(self.fc_norm), axis=-1)
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, by_layer, strict=True)]
            taps = mx.concatenate(normed, axis=-1)
        return self.fc(taps)

    def advance(
        self, features: mx.array, tokens: mx.array, cache: list[Any], target: Target
    ) -> mx.array:
        """Compute hidden states before the final norm, in the shapes of `StepwiseDrafter`."""
        first: DraftLayer = self.layers[0]
        normed = self.hidden_norm(features)
        x = normed if self.config.norm_before_residual else features
        embeddings = first.input_layernorm(self.embed(tokens, target))
        first_input = mx.concatenate([embeddings, normed], axis=-1)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            attend = partial(
                _attend,
                layer.self_attn,
                cache=layer_cache,
                first_input=first_input if layer is first else None,
            )
            x = layer(x, attend)
        return x

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Logits [N, S, DV] of hidden states [N, S, D]."""
        return DFlash.logits(self, self.norm(hidden), target)

    def feedback(self, hidden: mx.array) -> mx.array:
        """The features of the next rows: before the final norm, or (EAGLE 3.1) after it."""
        return self.norm(hidden) if self.config.norm_output else hidden


def _attend(
    attention: Attention, x: mx.array, *, cache: FullCache, first_input: mx.array | None
) -> mx.array:
    """Compute the heads' outputs [1, H, S, head_dim] of rows, which the cache keeps.

    The first layer attends from `first_input` [1, S, 2*D]; the others from their x [1, S, D].
    """
    x = x if first_input is None else first_input
    queries = attention.queries(x, cache.offset)
    keys, values = cache.update_and_fetch(*attention.keys_values(x, cache.offset))
    return attention.attend(queries, keys, values)
