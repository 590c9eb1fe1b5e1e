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
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gpt_oss, llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from ..subclassing import stock_class
from .selfcheck import KernelCheckFailed
from .verify_matmul import Product


class KernelLayer(nn.Module):
    """A layer that runs few rows on our kernels. Mixed into a stock class."""

    def __call__(self, x: mx.array, *experts: Any, **named: Any) -> mx.array:
        """x [..., K] -> [..., N]; with experts [..., k] for every row, as in the stock class."""
        rows = experts[0].size // self._top_k if experts else x.size // x.shape[-1]
        if rows in self._rows:
            try:
                return self._on_kernel(x, *experts)
            except KernelCheckFailed:
                pass
        return super().__call__(x, *experts, **named)

    def _on_kernel(self, x: mx.array, *experts: Any) -> mx.array:
        raise NotImplementedError


class KernelGated(KernelLayer):
    """A dense gated unit on our kernel. `UNITS` lists the classes."""

    def _on_kernel(self, x: mx.array) -> mx.array:
        return self["down_proj"](self._gated(x)[0])


class KernelSwitchGLU(KernelLayer, SwitchGLU):
    """The gated units of experts on our kernel, which sorts the rows by expert."""

    def _on_kernel(self, x: mx.array, experts: mx.array) -> mx.array:
        if self._gated is not None:
            y = self._gated(x, experts)[0]
        else:  # biases, or another activation
            ups = of_experts(self["up_proj"], x, experts)
            gates = of_experts(self["gate_proj"], x, experts)
            y = self.activation(ups, gates)
        return of_experts(self["down_proj"], y, experts)


class FusedProjections(threading.local):
    """Linear layers that multiply the same rows in one launch. Results are kept per thread.

    Args:
        product: returns the products [..., N] of x [..., K] with the weights of all layers.
    """

    def __init__(self, product: Callable[[mx.array], Sequence[mx.array]]) -> None:
        self._product = product
        # The last input, and its results that have not been used yet, by layer.
        self._waiting: tuple[mx.array | None, dict[int, mx.array]] = None, {}

    def __call__(self, place: int, x: mx.array) -> mx.array:
        """The product of layer `place`."""
        last_input, results = self._waiting
        if last_input is not x or place not in results:
            results = dict(enumerate(self._product(x)))
            self._waiting = x, results
        y = results.pop(place)
        if not results:
            self._waiting = None, {}
        return y


_MLP = ("gate_proj", "up_proj", "down_proj")
# mlx-lm's classes whose forward is down_proj(swiglu(gate_proj(x), up_proj(x))).
_DENSE = (llama.MLP, qwen3.MLP, qwen3_moe.MLP, qwen3_next.Qwen3NextMLP)
UNITS: Mapping[type, type] = {
    unit: type(f"Kernel{unit.__name__}", (KernelGated, unit), {}) for unit in _DENSE
} | {SwitchGLU: KernelSwitchGLU}

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
            pair = [unit.gate_proj._product, unit.up_proj._product]
            gated = Product.of(pair, True) if _can_gate(unit) else None
            if gated is not None or type(unit) is SwitchGLU:
                unit._rows = unit.gate_proj._rows
                unit._top_k = unit.gate_proj._top_k
                unit._gated = gated
                unit.__class__ = UNITS[type(unit)]
    for sharing in shared_inputs(model):
        groups: dict[Any, list[Any]] = {}  # by what layers have in common
        for layer in sharing:
            if hasattr(layer, "_rows"):
                groups.setdefault((layer._rows, _kind(layer)), []).append(layer)
        for layers in groups.values():
            if len(layers) > 1:
                product = Product.of([layer._product for layer in layers], False)
                fused = FusedProjections(product)
                for place, layer in enumerate(layers):
                    layer._fused = partial(fused, place)


def launches(model: nn.Module) -> Iterator[list[Any]]:
    """The groups of a model's layers that share launches: gated units and shared inputs."""
    for unit in model.modules():
        if type(unit) in UNITS:
            yield [getattr(unit, name) for name in _MLP]
    yield from shared_inputs(model)


def _can_gate(unit: Any) -> bool:
    """Whether gate and up of a unit can share a launch."""
    gate = unit.gate_proj
    up = unit.up_proj
    if "bias" in gate or "bias" in up:
        return False
    if isinstance(unit, SwitchGLU) and type(unit.activation) is not SwiGLU:
        return False
    return gate.weight.shape == up.weight.shape and _kind(gate) == _kind(up)


def shared_inputs(model: nn.Module) -> Iterator[list[Any]]:
    """Groups of a model's layers that get the same array."""
    for module in model.modules():
        projections = _PROJECTIONS.get(stock_class(module))
        if projections is not None:
            yield [getattr(module, name) for name in projections]


def _kind(layer: Any) -> tuple[Any, ...]:
    """What fused layers have in common: everything but the shapes of their weights."""
    [w] = layer._product.weights
    return type(layer), w.dtype if isinstance(w, mx.array) else w.kind[1:]


def _same_rows(layers: Iterable[Any]) -> bool:
    """Whether all of these layers run on our kernels, and for the same rows."""
    rows = {getattr(layer, "_rows", None) for layer in layers}
    return len(rows) == 1 and None not in rows


def of_experts(layer: Any, x: mx.array, experts: mx.array) -> mx.array:
    """x [..., K] or [..., k, K] by the experts [..., k] of one of our layers -> [..., k, N]."""
    [y] = layer._product(x, experts)
    return y + layer["bias"][experts] if "bias" in layer else y
