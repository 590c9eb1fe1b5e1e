"""Reads weights from disk, and into a model that is quantized or sharded first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import StrictDataclassError
from mlx.utils import tree_flatten

from ..errors import SettingsError, WeightsError
from ..targets import Target
from ..validation import ErrorWrapper, TokenizersError
from .folder import StoredTensor
from .quantization import Quantization, stored_mode

# The suffix of the scales of 8-bit floats, in DeepSeek-V3's format.
SCALES = "_scale_inv"
# MLX's errors for broken files, and for shapes and dtypes that do not fit.
MLX_ERRORS = (RuntimeError, ValueError, OSError)
# The errors of building and loading a model with a wrong config. mlx-lm's classes check little of
# it; they compute with it until something fails.
LOADING_ERRORS = (
    *MLX_ERRORS,
    ArithmeticError,  # ZeroDivisionError, OverflowError: a size of 0, a number too large for C
    AssertionError,
    AttributeError,
    ImportError,  # a model_type without its module or package
    LookupError,
    MemoryError,  # a size that no machine has
    TypeError,  # text in place of a number
)
# Transformers' errors for tokenizer files.
TOKENIZER_FILE_ERRORS = (*LOADING_ERRORS, StrictDataclassError, TokenizersError)


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def float_bytes() -> int | None:
    """The size of a floating-point weight once loaded: 4 bytes on the CPU, None if unchanged."""
    return 4 if on_cpu() else None


class SupportsSharding(Protocol):
    """Machines that share a target, such as a `cluster.Cluster`.

    Attributes:
        size: the number of machines.
    """

    size: int

    def shard(self, name: str, model: nn.Module) -> None:
        """Reduce a model to this machine's part, before its weights are read."""

    def open(self, model: nn.Module, tokenizer: Any, config: dict[str, Any], name: str) -> Target:
        """Make the target that runs on all machines from this machine's part, and run it once."""


def load_file(file: Path) -> dict[str, mx.array]:
    """The tensors of a file by name, not read yet. Raises `WeightsError`."""
    with ErrorWrapper(WeightsError, f"{file}: the weights cannot be read", MLX_ERRORS):
        return cast(dict[str, mx.array], mx.load(str(file)))


def load_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    """Tensors of a folder under new names, not read yet. Raises `WeightsError`."""
    paths = {tensor.file for tensor in tensors.values()}
    files = {path: load_file(path) for path in paths}
    return {name: files[tensor.file][tensor.name] for name, tensor in tensors.items()}


def without_fp8(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Convert 8-bit floats to bfloat16, lazily. Other tensors are returned as they are.

    Args:
        weights: E4M3 weights [..., M, N] as uint8, with one scale per block in a tensor
            [..., M / 128, N / 128] whose name has the suffix `_scale_inv` (DeepSeek-V3's format).
    """
    converted = dict(weights)
    for name in weights:
        if f"{name}{SCALES}" not in weights:
            continue
        scales = converted.pop(f"{name}{SCALES}")
        floats = mx.from_fp8(weights[name], dtype=mx.bfloat16)
        if scales.ndim > 1:
            for axis in (-2, -1):
                size = floats.shape[axis]
                blocks = scales.shape[axis]
                least = -(-size // blocks)  # elements of a block, if all are of one size
                block = 1 << (least - 1).bit_length()  # a power of two; the last may be smaller
                scales = mx.repeat(scales, block, axis)
            scales = scales[..., : floats.shape[-2], : floats.shape[-1]]
        converted[name] = (floats * scales).astype(mx.bfloat16)
    return converted


def load_as_stored(
    drafter: nn.Module,
    weights: Mapping[str, mx.array],
    error_prefix: str,
    published: Callable[[str], str] = str,
) -> None:
    """Load the weights of a drafter, lazily. Layers that are stored quantized become quantized.

    Args:
        drafter: the network, changed in place.
        weights: the tensors by our names.
        error_prefix: the beginning of error messages.
        published: returns the name of a tensor in its file, given our name.

    Raises:
        WeightsError: the tensors do not match the network; the message names one.
    """

    def stored_as(name: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{name}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        columns = module.weight.shape[-1]
        scales = weights[f"{name}.scales"]
        # Codes are packed in words of 32 bits.
        bits = weights[f"{name}.weight"].shape[-1] * 32 // columns
        group_size = columns // scales.shape[-1]
        mode = stored_mode(bits, group_size, scales.dtype == mx.uint8)
        return {"bits": bits, "group_size": group_size, "mode": mode}

    quantized_prefix = f"{error_prefix} the quantized weights cannot be used"
    with ErrorWrapper(WeightsError, quantized_prefix, MLX_ERRORS):
        nn.quantize(drafter, class_predicate=stored_as)
    expected = dict(tree_flatten(drafter.parameters()))
    for name in sorted(expected.keys() ^ weights.keys()):
        problem = "is missing" if name in expected else "has no place in it"
        raise WeightsError(f"{error_prefix} the tensor {published(name)} {problem}.")
    for name, tensor in weights.items():
        shape = expected[name].shape
        if tensor.shape != shape:
            problem = f"is {tensor.shape} and not {shape}"
            raise WeightsError(f"{error_prefix} the tensor {published(name)} {problem}.")
    drafter.load_weights(list(weights.items()))


def check_not_quantized(name: str, wanted: Quantization | None, quantized: bool) -> None:
    """Raise `SettingsError` if weights that are already quantized should be quantized."""
    if wanted is not None and quantized:
        raise SettingsError(f"{name} is quantized already: leave out the bits to use it as it is.")


def start_reading(
    name: str,
    model: nn.Module,
    quantization: Quantization | None,
    cluster: SupportsSharding | None = None,
) -> None:
    """Cast, quantize and shard the weights, and start reading them into memory."""
    if on_cpu():
        # MLX's CPU kernels are slow and inexact in half precision.
        model.set_dtype(mx.float32)
    if quantization is not None:
        quantization.apply(model)
    if cluster is not None:
        cluster.shard(name, model)
    model.eval()
    mx.async_eval(model.parameters())
