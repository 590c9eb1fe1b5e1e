"""Queries, keys and values of a layer in one launch, and what enters a recurrence.

An attention layer calls three linear layers one after another, with the same array. The first of
them to be called multiplies for all three, and the others find their results. Nothing of the
attention's own code is replaced; an array that is not the same object is multiplied anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gpt_oss, llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next

from .gated import weights
from .verify_beside import VerifyBeside
from .weights import traits

_ATTENTION = (
    gpt_oss.AttentionBlock,
    llama.Attention,
    qwen2.Attention,
    qwen3.Attention,
    qwen3_moe.Attention,
    qwen3_next.Qwen3NextAttention,
)
# The layers to which mlx-lm's classes hand one array.
_PARTS: Mapping[type, Sequence[str]] = {
    **dict.fromkeys(_ATTENTION, ("q_proj", "k_proj", "v_proj")),
    qwen3_next.Qwen3NextGatedDeltaNet: ("in_proj_qkvz", "in_proj_ba"),
    qwen3_5.GatedDeltaNet: ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}


class Beside:
    """Layers that multiply the same rows.

    Args:
        kernel: the product of all of them.
        layers: they, in the kernel's order.
    """

    def __init__(self, kernel: VerifyBeside, layers: Sequence[nn.Module]) -> None:
        self._kernel, self._layers = kernel, tuple(layers)
        self._x: mx.array | None = None  # what the results that wait are of
        self._results: dict[int, mx.array] = {}  # of the layers that have not asked yet

    def __call__(self, layer: nn.Module, x: mx.array) -> mx.array:
        """The product of x [..., K] with a layer's weights, [..., N]."""
        place = next(i for i, each in enumerate(self._layers) if each is layer)
        if self._x is not x or place not in self._results:
            self._x = x
            self._results = dict(enumerate(self._kernel(x, list(map(weights, self._layers)))))
        y = self._results.pop(place)
        if not self._results:
            self._x = None
        return y


def put_side_by_side(model: nn.Module, kernel: VerifyBeside) -> None:
    """Have layers share a launch where all that read one array were given to our kernels."""
    for module in model.modules():
        if type(module) in _PARTS:
            layers = [getattr(module, name) for name in _PARTS[type(module)]]
            if _fit(layers):
                beside = Beside(kernel, layers)
                for layer in layers:
                    layer._beside = beside


def _fit(layers: Sequence[Any]) -> bool:
    """Whether the layers run on our kernels for the same rows, with weights of one kind."""
    if any(not hasattr(layer, "_rows") for layer in layers):
        return False
    first = layers[0]
    return all(
        type(layer) is type(first)
        and layer._rows == first._rows
        and traits(weights(layer)) == traits(weights(first))
        for layer in layers
    )
