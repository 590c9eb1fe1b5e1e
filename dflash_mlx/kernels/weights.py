"""Weight matrices as the matrix kernels take them: plain arrays, or MLX's affine quantization.

`metal/matrix_rows.h` has the other half: how a kernel reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import KernelError
from .launcher import FEWEST_ELEMENTS, Constant, dtype_name, in_device_memory

FLOATS = (mx.bfloat16, mx.float16, mx.float32)  # the commonest first, here and below
BITS = (4, 8)
GROUPS = (64, 32, 128)
TENSOR_ALIGNMENT = 128  # bytes between rows of a 4-bit tensor, and of its first row


@dataclass(frozen=True)
class AffineWeights:
    """What `mx.quantize` gives: value = scale * q + bias, where a group shares scale and bias.

    Args:
        words: uint32 [..., N, K * bits / 32], the lowest bits first.
        scales, biases: floating point [..., N, K / group_size].
        bits: 4 or 8.
        group_size: 32, 64 or 128.
        tensor_units: whether an M5's tensor units multiply by them.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int
    tensor_units: bool = False

    def __post_init__(self) -> None:
        """Check the fields. Raises `KernelError`."""
        if self.bits not in BITS or self.group_size not in GROUPS:
            raise KernelError(
                "Affine weights have 4 or 8 bits and groups of 32, 64 or 128, not "
                f"{self.bits} bits and groups of {self.group_size}."
            )
        groups = (*self.words.shape[:-1], self.shape[-1] // self.group_size)
        scales = self.scales
        biases = self.biases
        same = scales.dtype == biases.dtype and scales.shape == biases.shape == groups
        if self.words.dtype != mx.uint32 or scales.dtype not in FLOATS or not same:
            raise KernelError(
                f"Affine weights {self.words.shape} in {dtype_name(self.words)} with scales "
                f"{scales.shape} in {dtype_name(scales)} and biases {biases.shape} in "
                f"{dtype_name(biases)} have no kernel."
            )
        if self.tensor_units and not fits_tensor_units(self):
            raise KernelError(f"Tensor units do not take weights {self.shape} of {self.bits} bits.")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix they stand for: [..., N, K]."""
        return (*self.words.shape[:-1], self.words.shape[-1] * 32 // self.bits)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Shape, dtype of the scales, bits, group size, and whether tensor units multiply."""
        return self.shape, self.scales.dtype, self.bits, self.group_size, self.tensor_units

    @cached_property
    def inputs(self) -> list[mx.array]:
        """The arrays for `input_names`."""
        return [self.words, in_device_memory(self.scales), in_device_memory(self.biases)]


Weights = AffineWeights | mx.array


def every_form(dtype: mx.Dtype, tensor_units: bool, *shape: int) -> Iterator[Weights]:
    """Random weights [..., N, K] of a dtype in every form that models have, plain ones last."""
    values = mx.random.normal(shape, key=mx.random.key(0)).astype(dtype)
    for bits, group in product(BITS, (group for group in GROUPS if shape[-1] % group == 0)):
        w = AffineWeights(*mx.quantize(values, group, bits), bits, group)
        yield w
        if tensor_units and fits_tensor_units(w):
            yield replace(w, tensor_units=True)
    yield values


def kernel_weights(layer: Any) -> Weights | None:
    """A layer's weights as the kernels take them; None for others, such as 6 bits or mxfp4."""
    if "scales" not in layer:
        return layer.weight if layer.weight.dtype in FLOATS else None
    if getattr(layer, "mode", "affine") != "affine":
        return None
    try:
        return AffineWeights(
            layer.weight,
            scales=layer.scales,
            biases=layer.biases,
            bits=layer.bits,
            group_size=layer.group_size,
        )
    except KernelError:
        return None


def fits_tensor_units(w: Weights) -> bool:
    """Whether `metal/tensor_tile.h` takes these weights."""
    if not isinstance(w, AffineWeights) or len(w.shape) != 2:
        return False
    columns, depth = w.shape
    return w.bits == 4 and w.scales.dtype == mx.bfloat16 and columns % 32 == depth % 256 == 0


def aligned(words: mx.array) -> mx.array:
    """The words, or a copy if they are a view that does not begin at a multiple of 128 bytes.

    Tensor units need such an address, and MLX's new arrays have one.
    """
    address = np.asarray(words).__array_interface__["data"][0]
    if address % TENSOR_ALIGNMENT == 0:
        return words
    return words | mx.array(0, words.dtype)  # copies the words unchanged


def form(dtype: mx.Dtype, *weights: Weights) -> str:
    """Which kernel multiplies rows of a dtype by these weights: plain, affine or tensor."""
    affine = [w for w in weights if isinstance(w, AffineWeights)]
    if not affine:
        return "plain"
    return "tensor" if dtype == mx.bfloat16 and all(w.tensor_units for w in affine) else "affine"


def dequantized(w: Weights) -> mx.array:
    """The values [..., N, K] in float32, dequantized without half-precision rounding."""
    if isinstance(w, mx.array):
        return w.astype(mx.float32)
    scales = w.scales.astype(mx.float32)
    biases = w.biases.astype(mx.float32)
    return mx.dequantize(w.words, scales, biases, w.group_size, w.bits)


def result_dtype(x: mx.array, *weights: Weights) -> mx.Dtype:
    """The dtype in which MLX itself would multiply these. Raises `KernelError`."""
    arrays = [w.scales if isinstance(w, AffineWeights) else w for w in weights]
    for array in (x, *arrays):
        if array.dtype not in FLOATS:
            raise KernelError(
                f"The matrix kernels take float16, bfloat16 and float32, not {dtype_name(array)}."
            )
    return mx.result_type(x, *arrays)


def check_products(
    x: mx.array, layout: str, weights: Sequence[Weights], gated: bool, most: int = 1
) -> None:
    """Check x [..., K] and up to `most` weights of one kind, or a gate and its partner.

    `layout` is that of each weight, such as "[N, K]". Raises `KernelError`.
    """
    if not (len(weights) == 2 if gated else 1 <= len(weights) <= most):
        raise KernelError(f"{len(weights)} matrices do not share a launch.")
    if gated and weights[0].shape != weights[1].shape:
        raise KernelError(f"Gate and up differ: {weights[0].shape} and {weights[1].shape}.")
    kinds = [str(traits(w)) for w in weights]
    if len(set(kinds)) > 1:
        raise KernelError(f"Matrices that share a launch are of one kind, not {', '.join(kinds)}.")
    for w in weights:
        if len(w.shape) != layout.count(",") + 1:
            raise KernelError(f"The weights are {layout}, not {w.shape}.")
        if x.shape[-1] != w.shape[-1]:
            raise KernelError(f"x has {x.shape[-1]} columns, the weights have {w.shape[-1]}.")
        if min(x.size, inputs(w)[0].size) < FEWEST_ELEMENTS:
            raise KernelError(
                f"The matrix kernels take no arrays of fewer than {FEWEST_ELEMENTS} elements."
            )


def traits(w: Weights) -> dict[str, Constant]:
    """The constants of a kernel for these weights."""
    if isinstance(w, AffineWeights):
        return {"S": w.scales.dtype, "BITS": w.bits, "GROUP": w.group_size}
    return {"W": w.dtype}


def input_names(name: str, form: str) -> list[str]:
    """The input names of a kernel for the weights `name`."""
    return [name] if form == "plain" else [name, f"{name}_scales", f"{name}_biases"]


def inputs(w: Weights) -> list[mx.array]:
    """The arrays for `input_names`."""
    return w.inputs if isinstance(w, AffineWeights) else [w]


def kind(w: Weights) -> tuple[Any, ...]:
    """What a launch depends on: weights of one kind share it."""
    return w.kind if isinstance(w, AffineWeights) else (w.shape, w.dtype)


def describe_weights(w: Weights) -> str:
    """Weights in a message: `4096x4096 affine 4-bit g64 bfloat16`."""
    shape = "x".join(map(str, w.shape))
    if isinstance(w, mx.array):
        return f"{shape} {dtype_name(w)}"
    units = " on tensor units" * w.tensor_units
    return f"{shape} affine {w.bits}-bit g{w.group_size} {dtype_name(w.scales)}{units}"


def matrix(name: str, form: str) -> str:
    """Metal: the weights `name` [..., N, K] as the products take them."""
    arrays = ", ".join(input_names(name, form))
    kind = "PlainMatrix<W>" if form == "plain" else "AffineWeights<S, BITS, GROUP>"
    return f"dflash::{kind}{{{arrays}, K}}"


def take_columns(w: Weights, columns: mx.array) -> Weights:
    """Some columns of a result: rows of w [..., N, K]."""
    if isinstance(w, mx.array):
        return mx.take(w, columns, axis=-2)
    words, scales, biases = (mx.take(x, columns, axis=-2) for x in (w.words, w.scales, w.biases))
    return AffineWeights(words, scales=scales, biases=biases, bits=w.bits, group_size=w.group_size)
