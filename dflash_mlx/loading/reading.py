"""Reading weights: from the disk, and into a model that is quantized or sharded on the way."""

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
from .quantization import Quantization, mode_of

SCALES = "_scale_inv"
MLX_ERRORS = (RuntimeError, ValueError, OSError)  # shapes and dtypes that do not fit, broken files
# mlx-lm's classes check little of a config: they compute with it until something fails.
MODEL_ERRORS = (
    *MLX_ERRORS,
    ArithmeticError,  # ZeroDivisionError, OverflowError: a size of 0, a number too large for C
    AssertionError,
    AttributeError,
    ImportError,  # a model_type without its module or package
    LookupError,
    MemoryError,  # a size that no machine has
    TypeError,  # text in place of a number
)
TOKENIZER_FILE_ERRORS = (*MODEL_ERRORS, StrictDataclassError, TokenizersError)  # transformers'


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def float_bytes() -> int | None:
    """Bytes of a floating-point weight once loaded: f32 on the CPU, None for its own."""
    return 4 if on_cpu() else None


class SupportsSharding(Protocol):
    """Machines that share a target, such as a `cluster.Cluster`.

    Attributes:
        size: how many.
    """

    size: int

    def shard(self, name: str, model: nn.Module) -> None:
        """Reduce a model to this machine's part, before its weights are read."""

    def open(self, model: nn.Module, tokenizer: Any, config: dict[str, Any], name: str) -> Target:
        """The target over all machines, from this machine's part. It has run once."""


def load_file(file: Path) -> dict[str, mx.array]:
    """A file's tensors by name, still on disk. Raises `WeightsError`."""
    with ErrorWrapper(WeightsError, f"{file}: the weights cannot be read", MLX_ERRORS):
        return cast(dict[str, mx.array], mx.load(str(file)))


def load_tensors(found: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    """Some tensors of a folder, under new names, still on disk. Raises `WeightsError`."""
    files = {file: load_file(file) for file in {tensor.file for tensor in found.values()}}
    return {name: files[tensor.file][tensor.name] for name, tensor in found.items()}


def without_fp8(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Weights [..., M, N] in bfloat16 for 8-bit floats, lazily.

    Args:
        weights: uint8 arrays of E4M3 beside their scales [..., M / 128, N / 128], one for each
            block, in tensors with the suffix `_scale_inv` (DeepSeek-V3's format); others as given.
    """
    found = dict(weights)
    for name in [name for name in weights if f"{name}{SCALES}" in weights]:
        scales = found.pop(f"{name}{SCALES}")
        floats = mx.from_fp8(found[name], dtype=mx.bfloat16)
        for axis in (-2, -1) if scales.ndim > 1 else ():
            size = floats.shape[axis]
            blocks = scales.shape[axis]
            block = 1 << (-(-size // blocks) - 1).bit_length()  # the last one may be cut
            scales = mx.repeat(scales, block, axis)
        if scales.ndim > 1:
            scales = scales[..., : floats.shape[-2], : floats.shape[-1]]
        found[name] = (floats * scales).astype(mx.bfloat16)
    return found


def load_as_stored(
    drafter: nn.Module,
    weights: Mapping[str, mx.array],
    wrong: str,
    published: Callable[[str], str] = str,
) -> None:
    """Give a drafter its weights, lazily; layers that are stored quantized become quantized.

    Args:
        drafter: changed in place.
        weights: by our names.
        wrong: the beginning of an error.
        published: the name of a tensor in its file, from ours.

    Raises `WeightsError`, naming the tensor, unless the tensors match the network.
    """

    def stored_as(name: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{name}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        columns = module.weight.shape[-1]
        scales = weights[f"{name}.scales"]
        bits = weights[f"{name}.weight"].shape[-1] * 32 // columns
        group_size = columns // scales.shape[-1]
        mode = mode_of(bits, group_size, scales.dtype == mx.uint8)
        return {"bits": bits, "group_size": group_size, "mode": mode}

    with ErrorWrapper(WeightsError, f"{wrong} the quantized weights cannot be used", MLX_ERRORS):
        nn.quantize(drafter, class_predicate=stored_as)
    expected = dict(tree_flatten(drafter.parameters()))
    for name in sorted(expected.keys() ^ weights.keys()):
        problem = "is missing" if name in expected else "has no place in it"
        raise WeightsError(f"{wrong} the tensor {published(name)} {problem}.")
    for name, tensor in weights.items():
        shape = expected[name].shape
        if tensor.shape != shape:
            problem = f"is {tensor.shape} and not {shape}"
            raise WeightsError(f"{wrong} the tensor {published(name)} {problem}.")
    drafter.load_weights(list(weights.items()))


def check_not_quantized(name: str, wanted: Quantization | None, quantized: bool) -> None:
    """Raise `SettingsError` if weights that are quantized already should be quantized."""
    if wanted is not None and quantized:
        raise SettingsError(f"{name} is quantized already: leave out the bits to use it as it is.")


def start_reading(
    name: str,
    model: nn.Module,
    quantization: Quantization | None,
    cluster: SupportsSharding | None = None,
) -> None:
    """Cast, quantize and shard the weights, and begin to read them into memory."""
    if on_cpu():
        # MLX's CPU kernels are slow and coarse in half precision; f32 is neither.
        model.set_dtype(mx.float32)
    if quantization is not None:
        quantization.apply(model)
    if cluster is not None:
        cluster.shard(name, model)
    model.eval()
    mx.async_eval(model.parameters())
