"""A new drafter for a target: its config in the published layout, and its first weights.

A drafter can start from the target's own layers. Its layers have the shape of Qwen3's, which the
target's often nearly have. The drafter's attention reads fused features instead of the target's
residual stream, so the fusion starts as the mean of the tapped layers, normed like the layer's
input. Weights that do not fit stay random.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.network import DFlash
from ..errors import SettingsError
from ..targets import Target
from ..validation import text_config

ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
DEEP = 12  # targets with fewer layers are tapped at three layers instead of five
# Additional fields: DFlash2's in its `dflash_config`, DSpark's in its config.
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 32,
    "selector_top_k": 8,
}
MARKOV = {
    "markov_rank": 64,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "sample_from_anchor": True,
}


def draft_config(
    target: Target,
    kind: str,
    block_size: int,
    mask_token: int,
    layers: int | None = None,
    causal: bool = False,
) -> dict[str, Any]:
    """The config.json of a new drafter.

    Args:
        kind: "dflash", "dflash2" or "dspark".
        block_size: rows of a block, with the anchor.
        mask_token: input token of the other rows.
        layers: of the drafter; None is 1 + (target layers) / 8, at most 5.
        causal: whether rows of a block attend only to earlier rows.

    Raises `SettingsError`.
    """
    check_kind(kind, block_size)
    if layers is not None and layers > target.num_layers:
        raise SettingsError(
            f"A drafter of {layers} layers is deeper than {target.name}, which has "
            f"{target.num_layers}: lower --layers."
        )
    layers = layers or min(5, 1 + round(target.num_layers / 8))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        **_like(target),
        "num_hidden_layers": layers,
        "num_target_layers": target.num_layers,
        "block_size": block_size,
        "layer_types": ["full_attention"] * layers,
        "is_causal": causal,
        "torch_dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": tap_layers(target.num_layers),
        },
    }
    if kind == "dflash2":
        config["dflash_config"] |= SELECTOR
    if kind == "dspark":
        config |= MARKOV
    return config


def _like(target: Target) -> dict[str, Any]:
    """Config fields that are the target's."""
    shape = text_config(target.config)
    hidden, heads = target.hidden_size, shape["num_attention_heads"]
    rope = shape.get("rope_theta") or (shape.get("rope_parameters") or {}).get("rope_theta")
    return {
        "hidden_size": hidden,
        "intermediate_size": shape.get("intermediate_size") or 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": shape.get("num_key_value_heads") or heads,
        "head_dim": shape.get("head_dim") or hidden // heads,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": shape.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope or 10000.0),
        "max_position_embeddings": shape.get("max_position_embeddings", 40960),
    }


def check_kind(kind: str, block_size: int) -> None:
    """Raise `SettingsError` for an invalid kind or block size."""
    if kind not in ARCHITECTURES:
        raise SettingsError(f"The kind is one of {', '.join(ARCHITECTURES)}, not {kind!r}.")
    if block_size < 2:
        raise SettingsError(f"A block has at least two rows, not {block_size}.")


def tap_layers(layers: int) -> list[int]:
    """The target layers to tap: five from the second to the third last, as in DFlash
    (arXiv 2602.06036); three in a shallow target."""
    if layers < DEEP:
        return sorted({min(1, layers - 1), layers // 2, layers - 1})
    return [round(1 + i * (layers - 4) / 4) for i in range(5)]


def mask_token(target: Target, used: Iterable[int]) -> int:
    """A token for the masked rows that occurs in no text.

    Embedding rows beyond the tokenizer's vocabulary come first, then special tokens, then others.

    Raises `SettingsError` if every token is used.
    """
    tokenizer, taken = target.tokenizer, set(used) | set(target.tokenizer.eos_token_ids)
    special = sorted(getattr(tokenizer, "all_special_ids", []), reverse=True)
    beyond = range(len(tokenizer.get_vocab()), target.vocab_size)
    for token in (*beyond, *special, *range(target.vocab_size - 1, -1, -1)):
        if token not in taken and token < target.vocab_size:
            return token
    raise SettingsError(f"{target.name}: every token occurs in the data, so none can be the mask.")


def init_from_target(drafter: DFlash, target: Target) -> list[str]:
    """Copy layers of the target into a new drafter; returns the names of the weights that were set.

    Draft layer i of n becomes target layer round((i + 1) * L / (n + 1)). The final norm is the
    target's, because the target's head reads its output.
    """
    found: dict[str, mx.array] = {}
    depth, count = target.num_layers, len(drafter.layers)
    for index in range(count):
        source = target.layers[min(depth - 1, round((index + 1) * depth / (count + 1)))]
        for name, weight in _matrices(source):
            found[f"layers.{index}.{name}"] = weight
        _scale_norms(found, f"layers.{index}.", drafter, index)
    found["norm.weight"] = target.norm_weight()
    found["hidden_norm.weight"] = found.get("layers.0.input_layernorm.weight", mx.array(0.0))
    width, taps = drafter.config.hidden_size, len(drafter.config.target_layer_ids)
    found["fc.weight"] = mx.tile(mx.eye(width) / taps, (1, taps))
    shapes = {name: weight.shape for name, weight in tree_flatten(drafter.parameters())}
    # Copies in row order: a compiled function refuses arrays shared with the target, and rounding
    # depends on the layout, which a checkpoint does not store.
    fitting = {
        name: mx.contiguous(weight.astype(mx.float32) * 1)
        for name, weight in found.items()
        if shapes.get(name) == weight.shape
    }
    drafter.load_weights(list(fitting.items()), strict=False)
    mx.eval(drafter.parameters())
    return sorted(fitting)


def _matrices(layer: nn.Module) -> list[tuple[str, mx.array]]:
    """The weights of a layer by name, dequantized."""
    found = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            parts = (module.weight, module.scales, module.biases, module.group_size, module.bits)
            found.append((f"{name}.weight", mx.dequantize(*parts, module.mode)))
        elif "weight" in module:
            found.append((f"{name}.weight", module.weight))
        if isinstance(module, nn.Linear) and "bias" in module:
            found.append((f"{name}.bias", module.bias))
    return found


def _scale_norms(found: dict[str, mx.array], prefix: str, drafter: DFlash, index: int) -> None:
    """Set the weights of query and key norms that the target lacks to the usual size of both.

    The input of a projection is normed, its entries about 1 times the norm's weight, so the mean
    square of an output is the sum of the squares of its row, each times that weight's square.
    """
    attention: Any = drafter.layers[index].self_attn
    norm = found.get(f"{prefix}input_layernorm.weight")
    for part in ("q", "k"):
        name, projection = f"{prefix}self_attn.{part}_norm.weight", f"self_attn.{part}_proj.weight"
        weight = found.get(prefix + projection)
        if name in found or weight is None or norm is None:
            continue
        square = ((weight.astype(mx.float32) * norm.astype(mx.float32)) ** 2).sum(axis=-1)
        found[name] = mx.full((attention.head_dim,), mx.sqrt(square.mean()).item())
