"""The leanest round: the two forwards written by hand on mlx-lm's layers, and nothing else.

What any loop has to compute for a round of N rows, greedy: the drafter over N - 1 masked slots and
the newly kept rows, the target over N rows, an argmax of each, and one read. It is the lower bound
that our own rounds are measured against. No settings, no text, no threads.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..accept import accept
from ..cluster.sessions import LeadingTarget
from ..drafter.network import DFlash, DraftLayer
from ..targets import Target


def why_not(target: Target, drafter: Any) -> str | None:
    """Why there is no leanest round of this pair; None where there is one."""
    if isinstance(target, LeadingTarget):
        return "it is of one machine: others would not run its forwards"
    if target.config.get("model_type") not in ("qwen2", "qwen3", "llama"):
        return "it is written for Llama, Qwen2 and Qwen3"
    if {type(cache) for cache in make_prompt_cache(target.model)} != {KVCache}:
        return "it is written for full attention"
    if type(drafter) is not DFlash or any(drafter.config.windows + drafter.config.causal):
        return "it is written for DFlash with full attention"
    return None


class Leanest:
    """One request of a pair for which `why_not` is None. Weights are the pair's own."""

    def __init__(self, target: Target, drafter: DFlash) -> None:
        self._target, self._drafter = target, drafter
        self._caches, self._contexts = make_prompt_cache(target.model), drafter.make_cache()
        self._anchor, self._taps = 0, mx.zeros((1, 0, 0))

    def prefill(self, prompt: list[int]) -> int:
        """Read a prompt that fits one chunk; its next token."""
        logits, self._taps = self._verify(mx.array(prompt), last=True)
        choices: Any = logits.argmax(axis=-1).tolist()
        [self._anchor] = choices
        return self._anchor

    def ask(self, width: int) -> mx.array:
        """The graph of a round: its rows' tokens and the target's choices, [2 * width]."""
        block = mx.array([self._anchor, *[self._drafter.config.mask_token_id] * (width - 1)])
        if width > 1:
            drafted = self._draft(block).argmax(axis=-1)
            block = mx.concatenate([block[:1], drafted.astype(block.dtype)])
        logits, taps = self._verify(block)
        self._taps = mx.concatenate([self._taps, taps], axis=1) if width == 1 else taps
        return mx.concatenate([block, logits.argmax(axis=-1).astype(block.dtype)])

    def round(self, width: int) -> list[int]:
        """The tokens that a round of so many rows brings."""
        asked = self.ask(width)
        mx.eval(asked)
        read: Any = asked.tolist()
        kept, self._anchor = accept(read[:width], range(-1, width - 1), read[width:])
        for cache in self._caches:
            cache.trim(width - len(kept))
        rejected = width - len(kept)
        self._taps = self._taps[:, : self._taps.shape[1] - rejected]
        return [*(read[row] for row in kept[1:]), self._anchor]

    def _verify(self, tokens: mx.array, last: bool = False) -> tuple[mx.array, mx.array]:
        """Logits [N, V] and taps [1, N, K*D] of tokens [N]; `last`: the last row's logits alone."""
        model: Any = self._target.model
        h = model.model.embed_tokens(tokens[None])
        mask, outputs = create_attention_mask(h, self._caches[0]), []
        for layer, cache in zip(model.model.layers, self._caches, strict=True):
            h = layer(h, mask, cache)
            outputs.append(h)
        taps = mx.concatenate([outputs[layer] for layer in self._drafter.tap_layers], axis=-1)
        logits = self._target.head(model.model.norm(h[:, -1:] if last else h))
        return logits.squeeze(0), taps

    def _draft(self, block: mx.array) -> mx.array:
        """The drafter's logits [N - 1, V] of a block [N] of the anchor and masks."""
        drafter = self._drafter
        context = drafter.hidden_norm(drafter.fc(self._taps))
        x = self._target.embed(block[None])
        for layer, cache in zip(drafter.layers, self._contexts, strict=True):
            x = x + self._attend(layer, layer.input_layernorm(x), context, cache)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self._target.head(drafter.norm(x[:, 1:])).squeeze(0)

    def _attend(self, layer: DraftLayer, x: mx.array, context: mx.array, cache: Any) -> mx.array:
        of, rows, start = layer.self_attn, mx.concatenate([context, x], axis=1), cache.offset

        def heads(y: mx.array) -> mx.array:
            return y.reshape(1, y.shape[1], -1, of.head_dim)

        keys = of.rope(of.k_norm(heads(of.k_proj(rows))).transpose(0, 2, 1, 3), offset=start)
        values = heads(of.v_proj(rows)).transpose(0, 2, 1, 3)
        keys, values = cache.update(keys, values, block=x.shape[1])
        queries = of.q_norm(heads(of.q_proj(x))).transpose(0, 2, 1, 3)
        queries = of.rope(queries, offset=cache.offset)
        seen = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=of.scale, mask=None
        )
        return of.o_proj(seen.transpose(0, 2, 1, 3).flatten(2))
