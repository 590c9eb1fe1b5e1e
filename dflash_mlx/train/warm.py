"""A drafter that begins as something that knows the target already: its own layers.

The drafter's layers are of Qwen3's shape, the target's often nearly so. Its attention reads fused
features where the target's reads its own stream, so the fusion begins as the mean of the tapped
layers, normed as the layer below would. What does not fit stays as a new drafter has it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.network import DFlash
from ..targets import Target


def start_from_target(drafter: DFlash, target: Target) -> list[str]:
    """Copy layers of the target into a new drafter; the names of the drafter's that were set.

    Draft layer i of n becomes target layer round((i + 1) * L / (n + 1)). The final norm is the
    target's own, because its head reads what comes out of it.
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
    # Arrays of their own, by rows: one that the target holds too cannot be an input of a compiled
    # function, and a layout that a checkpoint forgets would round differently after it.
    fitting = {
        name: mx.contiguous(weight.astype(mx.float32) * 1)
        for name, weight in found.items()
        if shapes.get(name) == weight.shape
    }
    drafter.load_weights(list(fitting.items()), strict=False)
    mx.eval(drafter.parameters())
    return sorted(fitting)


def _matrices(layer: nn.Module) -> list[tuple[str, mx.array]]:
    """The weights of a layer by their names in it, those that are quantized unpacked."""
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
    """Norms of queries and keys where the target has none: as large as both usually are.

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
