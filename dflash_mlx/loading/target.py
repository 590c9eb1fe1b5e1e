"""A target's folder -> a `Target`: mlx-lm's model of its config, its weights, its tokenizer."""

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
from .checks import check_memory
from .computed import bounded, complete, computes
from .contents import MODEL, of_config
from .folder import Folder
from .quantization import Quantization
from .reading import (
    MLX_ERRORS,
    MODEL_ERRORS,
    SCALES,
    SupportsSharding,
    check_not_quantized,
    float_bytes,
    load_file,
    start_reading,
    without_fp8,
)
from .rotations import spelled_for
from .tokenizer import read_tokenizer

if TYPE_CHECKING:
    from ..kernels.modules import Kernels


def is_language_model(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a model which mlx-lm loads, and not a drafter's."""
    if of_config(config).kind != MODEL:
        return False
    with suppress(KeyError, TypeError, ValueError):  # mlx-lm's, for what it does not know
        return classes_of(config) is not None
    return False


def check_weights(
    folder: Folder, quantization: Quantization | None, reserved: int = 0, machines: int = 1
) -> None:
    """Refuse weights that do not fit the memory, by their headers or their size on the hub.

    Args:
        folder: the model's.
        quantization: what happens to the weights on load.
        reserved: bytes of other weights.
        machines: that share them.

    Raises `NotEnoughMemoryError`.
    """

    def needed(choice: Quantization | None) -> int:
        return folder.memory(choice, float_bytes()) // machines + reserved

    smaller = not folder.is_quantized and (quantization is None or quantization.bits > 4)
    in_4_bits = needed(Quantization(4, 64)) if smaller else None
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
    """Load the target in a folder, if it fits beside `reserved` bytes of other weights.

    Args and errors as of `load`.
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
            from .wiring import check_exact, wire_target

            target = wire_target(target, kernels, exact or None)
            check_exact(target)
    target.sampling_defaults = folder.sampling_defaults
    return target


def read_target(folder: Folder) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of a folder, its weights still on disk, and the config that it computes.

    Raises: `ConfigError`, `WeightsError`.
    """
    for file in folder.files:
        load_file(file)  # so that an error about a file does not blame the config
    wrong = f"{folder.path / 'config.json'}: mlx-lm cannot load it"
    with ErrorWrapper(ConfigError, wrong, MODEL_ERRORS):
        config = spelled_for(deepcopy(folder.config))  # some classes change their arguments
        with TemporaryDirectory() as view:  # mlx-lm would read other files than the index's, too
            Path(view, "config.json").write_text("{}")  # all of it is in `config`
            for file in folder.files:
                Path(view, file.name).symlink_to(file.resolve())
            model, config = load_model(
                Path(view), lazy=True, model_config=config, get_model_classes=_reading_fp8
            )
        model.__dict__.pop("sanitize", None)
        complete(folder.name, model, config)
        return model, bounded(folder.name, model, config)


def _reading_fp8(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes of a config, 8-bit floats becoming 16-bit ones where its own leave them."""
    model_class, arguments = classes_of(config)

    def build(args: Any) -> nn.Module:
        model: Any = model_class(args)
        own = getattr(model, "sanitize", dict)
        if not computes(model, "other", f"weight{SCALES}"):
            model.sanitize = lambda weights: own(without_fp8(weights))
        return cast(nn.Module, model)

    return build, arguments


def check_runs(target: Target) -> None:
    """Read two tokens and drop them, and raise if that fails or gives NaN.

    Raises `ConfigError`; `WeightsError` if weights are the cause.

    Some fields of a config, such as a number of experts, matter only in a forward.
    """
    wrong = f"{target.name}: the model that config.json describes does not run"
    with ErrorWrapper(ConfigError, wrong, MODEL_ERRORS):
        session = target.start()
        for _ in session.prefill([0, 0]):
            pass
        logits, _ = session.verify(Proposal([0, 0]))
        broken = mx.isnan(logits).any().item()
        session.commit([0])
    if broken:
        if damaged := damaged_weights(target.model):
            raise WeightsError(f"{target.name}: {damaged}. Download it again.")
        raise ConfigError(f"{wrong} (its logits are NaN).")


def damaged_weights(model: nn.Module) -> str:
    """Which parameters hold NaN or infinity, in words; empty for none. Reads every weight."""
    damaged = [
        name
        for name, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating) and not mx.isfinite(value).all().item()
    ]
    if not damaged:
        return ""
    return f"NaN or infinite weights in {damaged[0]}, {len(damaged)} tensors in all"
