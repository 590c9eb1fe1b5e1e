"""A model's layers on our kernels.

`swap_layers` swaps layers once, when a model is loaded. A layer keeps its weights, their names and
its identity, but its class becomes a subclass. Few rows go through the kernel, more rows (a prompt)
through the stock layer. No class is patched, and layers that MLX runs are not changed.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import SettingsError
from .block_attention import MOST_NODES, BlockAttention
from .choose import (
    NONE,
    WIDEST,
    Rows,
    has_tensor_units,
    is_large,
    tensor_key,
)
from .delta_rule import DeltaRule
from .fused import KernelLayer, fuse, launches, of_experts
from .launcher import Calls, KernelFactory, Launcher
from .selfcheck import KernelCheckFailed, KernelChecks
from .shapes import Matrix, matrices
from .verify_matmul import ENOUGH_TILES, ENOUGH_TILES_LARGE, Product, VerifyMatmul
from .verify_matmul_moe import VerifyMatmulMoe
from .weights import FLOATS, aligned, fits_tensor_units, kernel_weights

# In exact decoding, verifications of up to this many rows go through our kernels.
EXACT_ROWS = MOST_NODES
EXACT = frozenset(range(1, EXACT_ROWS + 1))


class Kernels:
    """The compiled kernels that the layers of a model share. This is the list of all our kernels.

    Args:
        metal_kernel: compiles Metal sources. The tests use one that runs them on the CPU.
        tensor_units: whether products may run on tensor units; None to ask the device.

    Attributes:
        on_device: whether Metal compiles the kernels. An emulator's times mean nothing.
        checks: the checks that passed or failed on this device.
    """

    def __init__(
        self,
        metal_kernel: KernelFactory = mx.fast.metal_kernel,
        tensor_units: bool | None = None,
    ) -> None:
        device = mx.device_info()
        self.on_device = metal_kernel is mx.fast.metal_kernel
        if tensor_units is None:
            tensor_units = self.on_device and has_tensor_units(device, platform.mac_ver()[0])
        self.tensor_units = tensor_units
        large = is_large(str(device.get("device_name", "")))
        enough = ENOUGH_TILES_LARGE if large else ENOUGH_TILES
        self.checks = KernelChecks()
        self.product = VerifyMatmul(metal_kernel, enough, self.checks)
        self.experts = VerifyMatmulMoe(metal_kernel, enough, self.checks)
        self.attention = BlockAttention(metal_kernel, self.checks)
        self.delta = DeltaRule(metal_kernel, self.checks)

    def instances(self) -> Calls:
        """Small calls of every kernel in every form that models use, the most common forms first.

        Weights and gates may have another dtype than the rows, which are float32 then.
        """
        mixed = [(mx.float32, dtype) for dtype in FLOATS if dtype != mx.float32]
        pairs = [*zip(FLOATS, FLOATS, strict=True), *mixed]
        launchers = [value for value in vars(self).values() if isinstance(value, Launcher)]
        for (dtype, stored), launcher in product(pairs, launchers):
            yield from launcher.instances(dtype, stored, self.tensor_units)


@dataclass(frozen=True)
class KernelPlan:
    """Which of a model's layers run on our kernels, and when.

    Attributes:
        kernels: the kernels.
        rows: the numbers of rows at which they run, by `Matrix.key`, or for attention by the keys
            of `attention_rows`.
        exact: whether every row of a verification goes through our kernels, so that its bits do not
            depend on the number of rows.
        layers: the path of every swapped layer.
        required: whether the user asked for exact decoding, so that MLX's kernels may not run.
    """

    kernels: Kernels
    rows: Rows
    exact: bool
    layers: frozenset[str]
    required: bool = False

    @property
    def widest(self) -> int | None:
        """The most rows that a verification may have; None for any number."""
        return EXACT_ROWS if self.exact else None


class KernelLinear(KernelLayer):
    """A linear layer on our kernel for few rows."""

    def _on_kernel(self, x: mx.array) -> mx.array:
        if self._fused is not None:
            try:
                return _biased(self, self._fused(x))
            except KernelCheckFailed:
                pass
        return _biased(self, self._product(x)[0])


class KernelEmbedding(nn.Module):
    """An embedding that is also the head, on our kernel. Mixed into a stock class."""

    def as_linear(self, x: mx.array) -> mx.array:
        """x [..., D] -> logits [..., V]."""
        if x.size // x.shape[-1] in self._rows:
            try:
                return self._product(x)[0]
            except KernelCheckFailed:
                pass
        stock: Any = super()
        return stock.as_linear(x)


class KernelSwitchLinear(KernelLayer):
    """One linear layer per expert on our kernel.

    x [..., 1 or k, 1, K] of tokens sent to experts [..., k] -> [..., k, 1, N]. Sorted by expert,
    x is [tokens * k, 1, K] and the experts [tokens * k].
    """

    def _on_kernel(self, x: mx.array, experts: mx.array) -> mx.array:
        return mx.expand_dims(of_experts(self, x, experts), -2)


class KernelConv1d(nn.Conv1d):
    """A recurrent layer's short convolution per channel, for exact decoding.

    It always sums in the same order, while MLX chooses a kernel by the number of rows.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, S + kernel - 1, C] -> [B, S, C]."""
        rows = x.shape[1] - self.weight.shape[1] + 1
        if x.shape[0] * rows not in self._rows:
            return super().__call__(x)
        return _biased(self, _convolved(x, self.weight))


@mx.compile
def _convolved(x: mx.array, weight: mx.array) -> mx.array:
    """The sums in one launch: x [B, S + kernel - 1, C], weight [C, kernel, 1] -> [B, S, C]."""
    channels, kernel, _ = weight.shape
    taps = weight.reshape(channels, kernel).T  # [kernel, C]; products and sums in float32
    rows = x.shape[1] - kernel + 1
    y = taps[0] * x[:, :rows].astype(mx.float32)
    for tap in range(1, kernel):
        y = y + taps[tap] * x[:, tap : tap + rows].astype(mx.float32)
    return y.astype(x.dtype)


_KERNEL_LAYERS: Mapping[type, type] = {
    nn.Linear: KernelLinear,
    nn.QuantizedLinear: KernelLinear,
    nn.Embedding: KernelEmbedding,
    nn.QuantizedEmbedding: KernelEmbedding,
    SwitchLinear: KernelSwitchLinear,
    QuantizedSwitchLinear: KernelSwitchLinear,
}
# Our class for each stock class. Subclasses of a stock class may compute something else.
SWAPS: Mapping[type, type] = {
    stock: type(f"Kernel{stock.__name__}", (layer, stock), {})
    for stock, layer in _KERNEL_LAYERS.items()
}


def swap_layers(
    model: nn.Module,
    config: dict[str, Any],
    kernels: Kernels,
    rows: Rows,
    exact: bool = False,
) -> KernelPlan:
    """Swap in the layers that run on our kernels.

    Args:
        model: an mlx-lm model, changed in place.
        config: its config.json.
        kernels: the kernels that the layers run on.
        rows: the numbers of rows at which they run, by `Matrix.key`.
        exact: whether to send every verification of up to 64 rows through our kernels instead.

    Raises:
        SettingsError: exact=True, and none of our kernels can run one of the layers.
    """
    layers = set()
    layer_matrices = list(matrices(model, config))
    for path, module, matrix in layer_matrices:
        if exact and not can_swap(module):
            raise SettingsError(
                f"kernels=exact: {path} ({type(module).__name__}, {matrix.key}) has no kernel "
                "whose rows are independent; leave it out."
            )
    for path, module, matrix in layer_matrices:
        layer_rows = EXACT if exact else rows.get(matrix.key, NONE)
        if layer_rows and can_swap(module):
            units = kernels.tensor_units and not exact and rows.get(tensor_key(matrix.key))
            _swap(module, matrix=matrix, kernels=kernels, rows=layer_rows, tensor_units=bool(units))
            layers.add(path)
    fuse(model)
    if exact:
        _swap_convolutions(model)
    return KernelPlan(kernels, rows=rows, exact=exact, layers=frozenset(layers))


def will_be_exact(model: nn.Module, config: dict[str, Any], rows: Rows) -> bool:
    """Whether exact decoding is the default, because our kernels are faster at 1 to 16 rows.

    Exact decoding does not use tensor units, so results on tensor units do not count.
    """
    all_rows = frozenset(range(1, WIDEST + 1))
    for _, module, matrix in matrices(model, config):
        if not can_swap(module) or rows.get(tensor_key(matrix.key)):
            return False
        if not all_rows <= rows.get(matrix.key, NONE):
            return False
    return True


def chosen_together(
    model: nn.Module, config: dict[str, Any]
) -> list[dict[str, list[tuple[nn.Module, Matrix]]]]:
    """The groups of layers that can run on our kernels. In each group, the layers by `Matrix.key`.

    Keys are in one group if some of their layers share a launch: they can share it only if all of
    them run on our kernels at the same numbers of rows.
    """
    layers: dict[str, list[tuple[nn.Module, Matrix]]] = {}
    for _, module, matrix in matrices(model, config):
        if can_swap(module):
            layers.setdefault(matrix.key, []).append((module, matrix))
    key_by_layer: dict[int, str] = {}
    for key, pairs in layers.items():
        key_by_layer |= {id(module): key for module, _ in pairs}
    together = {key: {key} for key in layers}  # each key's group; groups are merged below
    for sharing in launches(model):
        keys = {key_by_layer[id(layer)] for layer in sharing if id(layer) in key_by_layer}
        merged = set().union(*(together[key] for key in keys))
        together |= dict.fromkeys(merged, merged)
    groups = dict.fromkeys(map(frozenset, together.values()))
    chosen_groups = []
    for group in groups:
        chosen_groups.append({key: layers[key] for key in layers if key in group})
    return chosen_groups


def _swap_convolutions(model: nn.Module) -> None:
    """Swap the convolutions of recurrent layers."""
    for module in model.modules():
        if type(module) is nn.Conv1d and _own_channel(module):
            module.__class__ = KernelConv1d
            module._rows = EXACT


def _own_channel(convolution: Any) -> bool:
    """Whether a convolution is per channel, without stride, padding or dilation."""
    channels, _, inputs = convolution.weight.shape
    plain = (convolution.stride, convolution.padding, convolution.dilation) == (1, 0, 1)
    return plain and inputs == 1 and convolution.groups == channels


def can_swap(module: nn.Module) -> bool:
    """Whether a layer can run on our kernels."""
    return type(module) in SWAPS and kernel_weights(module) is not None


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Give a model's layers their own classes again after the code inside."""
    originals = [(module, type(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, original in originals:
            module.__class__ = original
            for name in ("_rows", "_top_k", "_fused", "_product", "_gated"):
                vars(module).pop(name, None)


def _swap(
    module: Any, matrix: Matrix, kernels: Kernels, rows: frozenset[int], tensor_units: bool
) -> None:
    """Swap a layer's class for these numbers of rows."""
    w: Any = kernel_weights(module)
    if tensor_units and fits_tensor_units(w):
        module.weight = aligned(module.weight)
        w = replace(w, words=module.weight, tensor_units=True)
    module.__class__ = SWAPS[type(module)]
    module._rows = rows
    module._top_k = matrix.top_k
    module._fused = None
    module._product = Product(kernels.experts if matrix.experts else kernels.product, [w], False)


def _biased(layer: nn.Module, y: mx.array) -> mx.array:
    return y + layer["bias"] if "bias" in layer else y
