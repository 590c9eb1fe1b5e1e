"""Heads for multi-token prediction, which come in the target's own checkpoint.

The head has one decoder layer of the target's kind. A row joins the target's last hidden state of a
token, after the final norm, with the embedding of the token after it. The target's head makes
logits of the output, and the output is the feature of the next row: so one layer drafts any number
of tokens (DeepSeek-V3, arXiv 2412.19437).

Families differ in the names of tensors, in the order of the two inputs and in how norms are stored.
`LAYOUTS` is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import IncompatibleDrafterError
from ..kernels.shapes import weight_bytes
from ..targets.caches import FullCache
from ..targets.internals import (
    CacheList,
    DeepseekV32Attention,
    attention_of,
    mask_of,
    own_class,
    text_model,
)
from .stepwise import StepwiseDrafter

if TYPE_CHECKING:
    from ..targets import Target


@dataclass(frozen=True)
class HeadLayout:
    """How a family stores its head.

    Attributes:
        prefix: starts the names of the head's tensors; {N} is the number of the target's layers.
        names: maps beginnings of the names after the prefix to ours; the first match counts. None
            marks tensors that are not needed.
        layers: makes the decoder layers, from the class and the arguments of the target's layers.
        feature_first: whether the feature comes before the embedding.
        zero_centred: whether norms may be stored minus one.
    """

    prefix: str
    names: Mapping[str, str | None]
    layers: Callable[[Any, Any], list[nn.Module]]
    feature_first: bool = False
    zero_centred: bool = False


QWEN = HeadLayout(
    "mtp.",
    {
        "pre_fc_norm_embedding.": "embedding_norm.",
        "pre_fc_norm_hidden.": "feature_norm.",
        "fc.": "fc.",
        "norm.": "norm.",
        "layers.": "layers.",
    },
    lambda layer, args: [layer(args, args.full_attention_interval - 1)],
    zero_centred=True,
)
DEEPSEEK = HeadLayout(
    "model.layers.{N}.",
    {
        "enorm.": "embedding_norm.",
        "hnorm.": "feature_norm.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": None,  # copies of the target's
        "embed_tokens.": None,
        "": "layers.0.",
    },
    lambda layer, args: [layer(args, args.num_hidden_layers)],
)
MIMO = HeadLayout(
    "model.mtp_layers.0.",
    {
        "token_layernorm.": "embedding_norm.",
        "hidden_layernorm.": "feature_norm.",
        "input_proj.": "fc.",
        "final_layernorm.": "norm.",
        "": "layers.0.",
    },
    lambda layer, args: [layer(args)],
    feature_first=True,
)
NEMOTRON = HeadLayout(
    "mtp.",
    {
        "layers.0.enorm.": "embedding_norm.",
        "layers.0.hnorm.": "feature_norm.",
        "layers.0.eh_proj.": "fc.",
        "layers.1.final_layernorm.": "norm.",
        "layers.": "layers.",
    },
    lambda layer, args: [layer(args, "*"), layer(args, "E")],
)
# mlx-lm's module of the target -> its layout. Qwen3 has no head of its own; recipes/ trains one.
LAYOUTS = {
    "qwen3": replace(QWEN, layers=lambda layer, args: [layer(args)], zero_centred=False),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), QWEN),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), DEEPSEEK),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), DEEPSEEK),
    "mimo": MIMO,
    "nemotron_h": NEMOTRON,
}


class MTPHead(StepwiseDrafter, nn.Module):
    """The head of a target; its weights are loaded by their names in `HeadLayout.names`.

    Args:
        target: the target, whose embedding, final norm and head it uses.
        layout: the layout of the target's family.

    Attributes:
        tap_layers: the index of the target's last layer.

    Raises `IncompatibleDrafterError` for a target that does not end with a norm in this process.
    """

    label = "MTP"

    def __init__(self, target: Target, layout: HeadLayout) -> None:
        super().__init__()
        hidden = target.hidden_size
        ending = target.parts.norm
        if ending is None:
            raise IncompatibleDrafterError(
                f"{target.name} does not end with a norm, whose output an MTP head reads."
            )
        # An attribute with an underscore is no parameter of the head.
        self._target_norm = (ending.weight, ending.eps)
        self._feature_first = layout.feature_first
        self.tap_layers = (target.num_layers - 1,)
        self.embedding_norm = nn.RMSNorm(hidden, eps=ending.eps)
        self.feature_norm = nn.RMSNorm(hidden, eps=ending.eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        text = text_model(target.model)
        self.layers = layout.layers(own_class(target.layers[-1]), text.args)
        self.norm = nn.RMSNorm(hidden, eps=ending.eps)
        # mlx-lm quantizes the same layers as in the target, and in the same way.
        self.quant_predicate = getattr(text, "quant_predicate", None)

    def make_cache(self) -> list[Any]:
        """Make an empty cache for the layer that attends, and one for its indexer if it has one."""
        indexed = isinstance(attention_of(self.layers[0]), DeepseekV32Attention)
        return [FullCache() for _ in range(1 + indexed)]

    def slot_cost(self, target: Target) -> float:
        """What a drafted token is likely to cost, in plain steps of the target."""
        head = target.parts.head or target.parts.embedding
        return (weight_bytes(self) + weight_bytes(head)) / weight_bytes(target.model)

    def fuse(self, taps: mx.array) -> mx.array:
        """Features [1, S, D], normed, from the last layer's outputs [1, S, D]."""
        weight, eps = self._target_norm
        return mx.fast.rms_norm(taps, weight, eps)

    def advance(
        self, features: mx.array, tokens: mx.array, cache: list[Any], target: Target
    ) -> mx.array:
        """Compute normed hidden states, in the shapes of `StepwiseDrafter`.

        They are the features of the next rows.
        """
        inputs = [self.embedding_norm(target.embed(tokens)), self.feature_norm(features)]
        if self._feature_first:
            inputs.reverse()
        x = self.fc(mx.concatenate(inputs, axis=-1))
        mask = mask_of(cache[0], x.shape[1], window_size=None, return_array=True)
        layer_cache: Any = cache[0] if len(cache) == 1 else CacheList(*cache)
        for layer in self.layers:
            x = layer(x, mask, layer_cache)
        return self.norm(x)

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Logits [1, S, V] of hidden states [1, S, D]."""
        return target.head(hidden)

    def check_fits(self, target: Target) -> None:
        """Raise `IncompatibleDrafterError` unless the target is as wide as the head."""
        width = self.norm.weight.size
        if width != target.hidden_size:
            raise IncompatibleDrafterError(
                f"The MTP head belongs to another target: it is {width} wide, {target.name} is "
                f"{target.hidden_size}."
            )
