"""Layers that share a launch: gate and up of an MLP, and the projections of one input (QKV).

Gated units: one kernel reads gate and up for the same rows; of experts, the rows are sorted once
for all three matrices. As in `modules`, an instance gets a subclass of its own class, and only of
classes whose forward is known.

Fused QKV: an attention layer calls three linear layers with the same array. The first call computes
all three products, and the others return theirs. The attention's own code stays as it is; an array
that is not the same object is multiplied separately. The inputs of a recurrence are fused likewise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gpt_oss, llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from .selfcheck import UnprovenError
from .weights import Weights

Products = Callable[[mx.array, Sequence[Weights]], Sequence[mx.array]]


class VerifyGated(nn.Module):
    """A dense gated unit on our kernel; `UNITS` has the classes."""

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., D] -> [..., D]."""
        if rows_of(x) in self._rows:
            gate, up = weights(self["gate_proj"]), weights(self["up_proj"])
            try:
                return self["down_proj"](self._kernels.product(x, gate, up))
            except UnprovenError:
                pass
        return super().__call__(x)


class VerifySwitchGLU(SwitchGLU):
    """The gated units of experts on our kernel, which sorts the rows itself."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """x [..., D] of tokens sent to experts [..., k] -> [..., k, D]."""
        if indices.size // indices.shape[-1] in self._rows:
            try:
                return self._on_ours(x, indices)
            except UnprovenError:
                pass
        return super().__call__(x, indices)

    def _on_ours(self, x: mx.array, indices: mx.array) -> mx.array:
        gate, up = self["gate_proj"], self["up_proj"]
        if self._shares_launch:
            y = self._kernels.experts(x, weights(gate), indices, weights(up))
        else:  # biases, or another activation
            ups, gates = (of_experts(layer, x, indices) for layer in (up, gate))
            y = self.activation(ups, gates)
        return of_experts(self["down_proj"], y, indices)


class FusedProjections(threading.local):
    """Linear layers that multiply the same rows; each thread has results of its own.

    Args:
        kernel: computes all their products.
        layers: the layers, in the kernel's order.
    """

    def __init__(self, kernel: Products, layers: Sequence[nn.Module]) -> None:
        self._kernel, self._layers = kernel, tuple(layers)
        self._places = {id(layer): place for place, layer in enumerate(layers)}
        self._x: mx.array | None = None  # the input of the waiting results
        self._results: dict[int, mx.array] = {}  # of the layers that were not called yet

    def __call__(self, layer: nn.Module, x: mx.array) -> mx.array:
        """The product of x [..., K] with a layer's weights, [..., N]."""
        place = self._places[id(layer)]
        if self._x is not x or place not in self._results:
            self._x = x
            self._results = dict(enumerate(self._kernel(x, [*map(weights, self._layers)])))
        y = self._results.pop(place)
        if not self._results:
            self._x = None
        return y


_MLP = ("gate_proj", "up_proj", "down_proj")
# mlx-lm's classes whose forward is down_proj(swiglu(gate_proj(x), up_proj(x))).
_DENSE = (llama.MLP, qwen3.MLP, qwen3_moe.MLP, qwen3_next.Qwen3NextMLP)
UNITS: Mapping[type, type] = {
    unit: type(f"Verify{unit.__name__}", (VerifyGated, unit), {}) for unit in _DENSE
} | {SwitchGLU: VerifySwitchGLU}

_ATTENTION = (
    gpt_oss.AttentionBlock,
    llama.Attention,
    qwen2.Attention,
    qwen3.Attention,
    qwen3_moe.Attention,
    qwen3_next.Qwen3NextAttention,
)
# mlx-lm's classes, and the layers to which they pass one array.
_PROJECTIONS: Mapping[type, Sequence[str]] = {
    **dict.fromkeys(_ATTENTION, ("q_proj", "k_proj", "v_proj")),
    qwen3_next.Qwen3NextGatedDeltaNet: ("in_proj_qkvz", "in_proj_ba"),
    qwen3_5.GatedDeltaNet: ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}


def fuse(model: nn.Module) -> None:
    """Fuse the layers of a model that run on our kernels for the same rows; changed in place."""
    for unit in model.modules():
        if type(unit) in UNITS and _same_rows(getattr(unit, name) for name in _MLP):
            unit._shares_launch = _can_gate(unit)
            if unit._shares_launch or type(unit) is SwitchGLU:
                unit._rows, unit._kernels = unit.gate_proj._rows, unit.gate_proj._kernels
                unit.__class__ = UNITS[type(unit)]
    for sharing in shared_inputs(model):
        groups: dict[Any, list[Any]] = {}  # by what layers have in common
        for layer in sharing:
            if hasattr(layer, "_rows"):
                form = layer._rows, "scales" in layer and layer._affine.tensor_units
                groups.setdefault((form, _kind(layer)), []).append(layer)
        for layers in groups.values():
            fused = FusedProjections(layers[0]._kernels.product.several, layers)
            for layer in layers if len(layers) > 1 else ():
                layer._fused = fused


def launches(model: nn.Module) -> Iterator[list[Any]]:
    """The groups of a model's layers that share launches: gated units and shared inputs."""
    for unit in model.modules():
        if type(unit) in UNITS:
            yield [getattr(unit, name) for name in _MLP]
    yield from shared_inputs(model)


def _can_gate(unit: Any) -> bool:
    """Whether gate and up of a unit can share a launch."""
    gate, up = unit.gate_proj, unit.up_proj
    if "bias" in gate or "bias" in up:
        return False
    if isinstance(unit, SwitchGLU) and type(unit.activation) is not SwiGLU:
        return False
    same = gate.weight.shape == up.weight.shape and gate.weight.dtype == up.weight.dtype
    return same and _kind(gate) == _kind(up)


def shared_inputs(model: nn.Module) -> Iterator[list[Any]]:
    """Groups of a model's layers that get the same array."""
    for module in model.modules():
        if type(module) in _PROJECTIONS:
            yield [getattr(module, name) for name in _PROJECTIONS[type(module)]]


def _kind(layer: Any) -> tuple[Any, ...]:
    """What fused layers have in common."""
    if "scales" not in layer:
        return type(layer), layer.weight.dtype
    return type(layer), layer.bits, layer.group_size, layer.scales.dtype


def _same_rows(layers: Iterable[Any]) -> bool:
    """Whether all of these layers run on our kernels, and for the same rows."""
    rows = {getattr(layer, "_rows", None) for layer in layers}
    return len(rows) == 1 and None not in rows


def rows_of(x: mx.array) -> int:
    """The rows of x [..., K]."""
    return x.size // x.shape[-1]


def weights(layer: Any) -> Weights:
    """The weights of one of our layers as the kernels take them."""
    return layer._affine if "scales" in layer else layer["weight"]


def of_experts(layer: Any, x: mx.array, indices: mx.array) -> mx.array:
    """x [..., K] or [..., k, K] by the experts [..., k] of one of our layers -> [..., k, N]."""
    y = layer._kernels.experts(x, weights(layer), indices)
    return y + layer["bias"][indices] if "bias" in layer else y
