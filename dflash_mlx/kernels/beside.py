"""Queries, keys and values of a layer in one launch, and what enters a recurrence.

An attention layer calls three linear layers one after another, with the same array. The first of
them to be called multiplies for all three, and the others find their results. Nothing of the
attention's own code is replaced; an array that is not the same object is multiplied anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gpt_oss, llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next

from .gated import same_rows, weights
from .verify_beside import VerifyBeside

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


def put_side_by_side(
    model: nn.Module, kernel: VerifyBeside, broken: frozenset[str] = frozenset()
) -> None:
    """Have layers share a launch where all that read one array were given to our kernels.

    broken: the `beside_key` of layers that are left alone.
    """
    for layers in neighbours(model):
        if same_rows(layers) and beside_key(layers) not in {None, *broken}:
            beside = Beside(kernel, layers)
            for layer in layers:
                layer._beside = beside


def neighbours(model: nn.Module) -> Iterator[list[Any]]:
    """The layers of a model to which one array is handed, group by group."""
    for module in model.modules():
        if type(module) in _PARTS:
            yield [getattr(module, name) for name in _PARTS[type(module)]]


def beside_key(layers: Sequence[Any]) -> str | None:
    """The name of a launch for these layers; None where their weights are of several kinds."""
    kinds = {(type(layer), *_form(layer)) for layer in layers}
    if len(kinds) > 1:
        return None
    _, *kind = kinds.pop()
    shapes = (f"{layer.weight.shape[0]}" for layer in layers)
    width = layers[0].weight.shape[1]
    return f"{' and '.join(shapes)} side by side x{width} {' '.join(map(str, kind))}"


def _form(layer: Any) -> tuple[Any, ...]:
    if "scales" not in layer:
        return (layer.weight.dtype,)
    return layer.bits, layer.group_size, layer.scales.dtype
