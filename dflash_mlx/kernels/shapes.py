"""The shapes of a model's matrices, by which kernels are chosen.

Weights may be lazy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..validation import text_config

# The config fields for the number of experts per token.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")


@dataclass(frozen=True)
class Matrix:
    """One matrix [N, K] of weights, or one of each expert.

    Attributes:
        columns, depth: N and K.
        size: bytes of its weights, scales and biases; of one expert.
        kind: "affine" or another mode of quantization, or "float".
        bits: per weight, without the scales.
        group_size: weights that share a scale; 0 for "float".
        experts: the number of experts; 0 for other layers.
        top_k: experts per token; 0 for other layers.
    """

    columns: int
    depth: int
    size: int
    kind: str
    bits: int
    group_size: int = 0
    experts: int = 0
    top_k: int = 0

    @property
    def key(self) -> str:
        """Its name in tables: `4096x12288 affine 4-bit g64`."""
        group = f" g{self.group_size}" if self.group_size else ""
        experts = f" {self.top_k} of {self.experts}" if self.experts else ""
        return f"{self.columns}x{self.depth} {self.kind} {self.bits}-bit{group}{experts}"


def matrices(model: nn.Module, config: dict[str, Any]) -> Iterator[tuple[str, nn.Module, Matrix]]:
    """Every matrix that a forward multiplies by: its path, its module and its shape.

    Args:
        model: an mlx-lm model.
        config: its config.json, for the number of experts of a token.
    """
    modules = [
        (path, module)
        for path, module in model.named_modules()
        if "weight" in module and module.weight.ndim > 1 and not isinstance(module, nn.Conv1d)
    ]
    tied = not any(path.endswith("lm_head") for path, _ in modules)
    for path, module in modules:
        # An embedding is read as a whole only where it is also the head.
        embedding = isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        if not embedding or (tied and path.endswith("embed_tokens")):
            yield path, module, _matrix(module, top_k(config))


def attention_key(heads: int, key_heads: int, head_dim: int) -> str:
    """The name of an attention shape in tables: `attention 32/8 heads of 128`."""
    return f"attention {heads}/{key_heads} heads of {head_dim}"


def top_k(config: dict[str, Any]) -> int:
    """The experts a token is sent to, 0 for a model without experts."""
    shape = text_config(config)
    return next((int(shape[name]) for name in _TOP_K if shape.get(name)), 0)


def activation_dtype(layer: Any) -> mx.Dtype:
    """The dtype of a linear layer's inputs and outputs."""
    return layer.scales.dtype if "scales" in layer else layer.weight.dtype


def weight_bytes(model: Any) -> int:
    """Bytes of an MLX module's weights."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _matrix(module: Any, experts_of_a_token: int) -> Matrix:
    *stacked, columns, depth = module.weight.shape
    size = weight_bytes(module)
    quantized = "scales" in module
    kind = getattr(module, "mode", "affine") if quantized else "float"
    bits = module.bits if quantized else 8 * module.weight.itemsize
    group_size = module.group_size if quantized else 0
    depth = depth * 32 // bits if quantized else depth  # 32-bit words hold 32 / bits weights
    experts = 0
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        [experts] = stacked
        size //= experts
    elif stacked:  # a matrix per head (MLA): together one taller matrix
        columns *= stacked[0]
    top = experts_of_a_token if experts else 0
    return Matrix(
        columns,
        depth=depth,
        size=size,
        kind=kind,
        bits=bits,
        group_size=group_size,
        experts=experts,
        top_k=top,
    )
