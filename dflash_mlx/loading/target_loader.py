"""Loads a `Target` from a folder: mlx-lm's model of its config, its weights, its tokenizer."""

from __future__ import annotations

import warnings
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from ..errors import ConfigError, WeightsError
from ..proposal import Proposal
from ..targets import Target
from ..targets.internals import classes_of
from ..threads import evaluate
from ..validation import ErrorWrapper
from .adapters import Adapter
from .config_gaps import apply_ignored_fields, cap_context, computes
from .contents import MODEL, config_contents
from .folder import Folder
from .memory_check import check_memory
from .quantization import Quantization
from .reading import (
    LOADING_ERRORS,
    MLX_ERRORS,
    SCALES,
    SupportsSharding,
    check_not_quantized,
    float_bytes,
    load_file,
    start_reading,
    without_fp8,
)
from .rope_config import normalize_rope_fields
from .tokenizer_loader import read_tokenizer

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


def is_language_model(config: dict[str, Any]) -> bool:
    """Whether a config.json describes a model that mlx-lm loads, and not a drafter."""
    if config_contents(config).kind != MODEL:
        return False
    with suppress(KeyError, TypeError, ValueError):  # mlx-lm's errors for unknown models
        return classes_of(config) is not None
    return False


def check_weights(
    folder: Folder, quantization: Quantization | None, reserved: int = 0, machines: int = 1
) -> None:
    """Refuse weights that do not fit into memory, by their headers or their size on the hub.

    Args:
        folder: the folder of the model.
        quantization: how the weights are quantized on load, None for not at all.
        reserved: bytes that other weights need.
        machines: the number of machines that share the weights.

    Raises:
        NotEnoughMemoryError: the weights do not fit.
    """

    def needed(choice: Quantization | None) -> int:
        return folder.memory(choice, float_bytes()) // machines + reserved

    can_shrink = not folder.is_quantized and (quantization is None or quantization.bits > 4)
    in_4_bits = needed(Quantization(4, 64)) if can_shrink else None
    check_memory(folder.name, needed(quantization), in_4_bits)


def open_target(
    folder: Folder,
    quantization: Quantization | None = None,
    reserved: int = 0,
    kernels: Kernels | None = None,
    exact: bool = False,
    cluster: SupportsSharding | None = None,
    adapter: Adapter | None = None,
) -> Target:
    """Load the target in a folder if it fits into memory with `reserved` bytes of other weights.

    The arguments and errors are those of `load`.
    """
    name = folder.name
    config = folder.config
    if quantization is not None and config.get("from_gguf"):
        warnings.warn(
            f"dflash-mlx: {name} is requantized to {quantization.bits} bits where it does not keep "
            "its own, so outputs differ from the file's.",
            stacklevel=3,
        )
    else:
        check_not_quantized(name, quantization, folder.is_quantized)
    check_weights(
        folder,
        quantization=quantization,
        reserved=reserved,
        machines=1 if cluster is None else cluster.size,
    )
    model, config = read_target(folder)
    start_reading(name, model=model, quantization=quantization, cluster=cluster)
    if adapter is not None:
        adapter.add_to(name, model)
        config = config | {"adapter": adapter.config}
    tokenizer = read_tokenizer(folder)  # while the weights are being read
    with ErrorWrapper(WeightsError, f"{name}: the weights cannot be used", MLX_ERRORS):
        evaluate(model)
    if cluster is not None:
        target = cluster.open(model, tokenizer, config, name)
    else:
        target = Target(model, tokenizer=tokenizer, config=config, name=name)
        check_runs(target)
        if kernels is not None:
            from .kernel_plan import check_exact, use_kernels

            target = use_kernels(target, kernels, exact or None)
            check_exact(target)
    target.sampling_defaults = folder.sampling_defaults
    return target


def read_target(folder: Folder) -> tuple[nn.Module, dict[str, Any]]:
    """Make mlx-lm's model of a folder, without reading its weights yet.

    Returns:
        The model, and the config that it computes.

    Raises:
        ConfigError, WeightsError: the config or a file is damaged.
    """
    for file in folder.files:
        load_file(file)  # so that an error about a file does not blame the config
    error_prefix = f"{folder.path / 'config.json'}: mlx-lm cannot load it"
    with ErrorWrapper(ConfigError, error_prefix, LOADING_ERRORS):
        own_config = deepcopy(folder.config)  # some classes change their arguments
        config = normalize_rope_fields(own_config)
        # mlx-lm reads every weight file in a folder, so it gets one with those of the index only.
        with TemporaryDirectory() as view:
            Path(view, "config.json").write_text("{}")  # all fields are in `config`
            for file in folder.files:
                Path(view, file.name).symlink_to(file.resolve())
            model, config = load_model(
                Path(view), lazy=True, model_config=config, get_model_classes=_classes_reading_fp8
            )
        model.__dict__.pop("sanitize", None)  # set by `_classes_reading_fp8`
        apply_ignored_fields(folder.name, model, config)
        return model, cap_context(folder.name, model, config)


def _classes_reading_fp8(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes for a config. Models that do not convert 8-bit floats learn to do so."""
    model_class, arguments = classes_of(config)

    def build(args: Any) -> nn.Module:
        model: Any = model_class(args)
        sanitize = getattr(model, "sanitize", dict)
        if not computes(model, "other", f"weight{SCALES}"):
            model.sanitize = lambda weights: sanitize(without_fp8(weights))
        return cast(nn.Module, model)

    return build, arguments


def check_runs(target: Target) -> None:
    """Run two tokens through the model and drop them.

    Some fields of a config, such as the number of experts, matter only in a forward.

    Raises:
        ConfigError: the forward fails or returns NaN.
        WeightsError: it returns NaN because weights are NaN or infinite.
    """
    error_prefix = f"{target.name}: the model that config.json describes does not run"
    with ErrorWrapper(ConfigError, error_prefix, LOADING_ERRORS):
        session = target.start()
        for _ in session.prefill([0, 0]):
            pass
        logits, _ = session.verify(Proposal([0, 0]))
        broken = mx.isnan(logits).any().item()
        session.commit([0])
    if broken:
        damaged = damaged_weights(target.model)
        if damaged:
            raise WeightsError(f"{target.name}: {damaged}. Download it again.")
        raise ConfigError(f"{error_prefix} (its logits are NaN).")


def damaged_weights(model: nn.Module) -> str:
    """Describe which parameters contain NaN or infinity; empty if none does. Reads all weights."""
    damaged = []
    for name, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item():
            damaged.append(name)
    if not damaged:
        return ""
    return f"NaN or infinite weights in {damaged[0]}, {len(damaged)} tensors in all"
