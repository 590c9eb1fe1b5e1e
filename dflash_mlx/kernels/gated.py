"""Gated units through our kernels: silu(x gate^T) (x up^T) in one pass, dense and of experts.

Gate and up read the same rows, and one kernel reads both matrices for them; of experts the rows
are put in the experts' order once for all three matrices. As in `modules`, an instance gets a
subclass of its own class, and only of classes whose code is known to be this unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3, qwen3_moe, qwen3_next
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from .weights import Weights


class VerifyGated(nn.Module):
    """What a dense unit becomes; `UNITS` has the classes."""

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., D] -> [..., D]."""
        if x.size // x.shape[-1] not in self._rows:
            return super().__call__(x)
        return self.down_proj(self._kernel(x, weights(self.gate_proj), weights(self.up_proj)))


class VerifySwitchGLU(SwitchGLU):
    """A unit of each expert."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """x [..., D] of tokens sent to experts [..., k] -> [..., k, D]."""
        if indices.size // indices.shape[-1] not in self._rows:
            return super().__call__(x, indices)
        order = mx.argsort(indices.reshape(-1))
        gate, up, down = (weights(getattr(self, name)) for name in _PARTS)
        hidden = self._kernel(x, gate, indices, up, order)
        return self._kernel(hidden, down, indices, order=order)


_PARTS = ("gate_proj", "up_proj", "down_proj")
# mlx-lm's classes whose forward is down_proj(swiglu(gate_proj(x), up_proj(x))).
_DENSE = (llama.MLP, qwen3.MLP, qwen3_moe.MLP, qwen3_next.Qwen3NextMLP)
UNITS: Mapping[type, type] = {
    unit: type(f"Verify{unit.__name__}", (VerifyGated, unit), {}) for unit in _DENSE
} | {SwitchGLU: VerifySwitchGLU}


def fuse(model: nn.Module, broken: frozenset[str] = frozenset()) -> None:
    """Have the units of a model run in one pass whose layers were all given to our kernels.

    broken: the `unit_key` of units that are left in parts.
    """
    for unit in model.modules():
        if type(unit) not in UNITS or not same_rows(getattr(unit, name) for name in _PARTS):
            continue
        if unit_key(unit) not in {None, *broken}:
            unit._rows, unit._kernel = unit.gate_proj._rows, unit.gate_proj._kernel
            unit.__class__ = UNITS[type(unit)]


def unit_key(unit: Any) -> str | None:
    """The name of a unit's pass over gate and up; None where they cannot share one."""
    layers = [getattr(unit, name) for name in _PARTS]
    if any("bias" in layer for layer in layers):
        return None
    if isinstance(unit, SwitchGLU) and type(unit.activation) is not SwiGLU:
        return None
    gate, up = layers[:2]
    if type(gate) is not type(up) or _form(gate) != _form(up):
        return None
    shape, dtype, *quantized = _form(gate)
    return " ".join(map(str, ("gate and up", "x".join(map(str, shape)), dtype, *quantized)))


def same_rows(layers: Iterable[Any]) -> bool:
    """Whether all of these layers run on our kernels, and for the same rows."""
    rows = {getattr(layer, "_rows", None) for layer in layers}
    return len(rows) == 1 and None not in rows


def _form(layer: Any) -> tuple[Any, ...]:
    """What gate and up must have in common."""
    quantized = (layer.bits, layer.group_size, layer.scales.dtype) if "scales" in layer else ()
    return layer.weight.shape, layer.weight.dtype, *quantized


def weights(layer: Any) -> Weights:
    """The weights of one of our layers as the kernels take them."""
    return layer._affine if "scales" in layer else layer.weight
