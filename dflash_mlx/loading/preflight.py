"""What can be refused of a pair before its weights are read, or even downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..drafter.config import DraftConfig
from ..drafter.networks import ARCHITECTURES, DRAFTER_FIELDS, needs_target
from ..errors import ConfigError
from ..targets.internals import classes_of
from ..validation import ErrorWrapper, read_json
from .checks import check_memory, memory_needed, read_target_config
from .computed import complete, spelled_for
from .hub import Hub
from .quantization import Quantization, is_fp8, is_quantized
from .registry import hub_gguf, known_facts, local_path

LOADED = ["model*.safetensors"]  # of a repository's files
_STORED = 2  # bytes per weight, as published


def check_target(
    name: str, hub: Hub, quantization: Quantization | None = None, machines: int = 1
) -> nn.Module | None:
    """Refuse a target that this mlx-lm has no model for, or that does not fit the memory.

    Args:
        name: of the target.
        hub: where its config.json and the sizes of its files are asked for.
        quantization: what happens to the weights on load.
        machines: that share them.

    Returns:
        Its model, with weights that are never computed; None if it is on this disk already.

    Raises: `ConfigError`, `NotEnoughMemoryError`, and the errors of `Hub.fetch`.
    """
    path = local_path(name, "target")
    if path is not None and path.is_file():
        with suppress(ImportError):  # of gguf; loading reports it
            from .gguf.header import read_base_models

            read_base_models(path)  # a damaged file is named before a drafter is fetched
    if path or _is_here(name, hub):
        return None
    config = read_target_config(hub.config(name))
    model = model_of(name, config)
    size = hub.remote_bytes(name, LOADED) * (2 if is_fp8(config) else 1)
    in_4_bits: int | None = None
    needed = float(size)
    if not is_quantized(config):
        in_4_bits = int(Quantization(4, 64).bytes_of(1) * size / _STORED)
        if quantization is not None:
            needed = quantization.bytes_of(1) * size / _STORED
        else:
            needed = size * (float_bytes() or _STORED) / _STORED
    check_memory(name, int(needed) // machines, in_4_bits)
    return model


def check_weights(
    name: str,
    weights: Sequence[Path],
    quantization: Quantization | None,
    reserved: int = 0,
    quantized: bool = False,
    machines: int = 1,
) -> None:
    """Refuse weight files that do not fit the memory, by their headers.

    Args:
        name: the model, for a message.
        weights: the files.
        quantization: what happens to the weights on load.
        reserved: bytes of other weights.
        quantized: whether the files hold quantized weights.
        machines: that share them.

    Raises `NotEnoughMemoryError`.
    """

    def needed(choice: Quantization | None) -> int:
        return memory_needed(weights, choice, float_bytes()) // machines + reserved

    smaller = not quantized and (quantization is None or quantization.bits > 4)
    check_memory(name, needed(quantization), needed(Quantization(4, 64)) if smaller else None)


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def float_bytes() -> int | None:
    """Bytes of a floating-point weight once loaded: f32 on the CPU, None for its own."""
    return 4 if on_cpu() else None


def check_drafter(name: str, hub: Hub, model: nn.Module | None) -> None:
    """Refuse a drafter that is not understood, or that was made for another target.

    Args:
        name: of the drafter.
        hub: where its config.json is asked for.
        model: the target's, from `check_target`; None to check the drafter alone.

    Raises: `ConfigError`, `IncompatibleDrafterError`, and the errors of `Hub.fetch`.
    """
    if local_path(name, "drafter"):
        return
    if (facts := known_facts(name)) is not None and facts.refused is not None:
        raise ConfigError(f"{name} is known not to load: {facts.refused}.")
    if _is_here(name, hub):
        return
    path = hub.config(name) / "config.json"
    if is_language_model(raw := read_json(path)):
        model_of(name, raw)
        return
    if needs_target(raw):
        return
    config = DraftConfig.from_file(path)
    if config.unreadable is not None:
        raise ConfigError(f"{name}: {config.unreadable}: it cannot be read.")
    embedding = next(
        (part for part in model.modules() if isinstance(part, nn.Embedding)) if model else iter(()),
        None,
    )
    if embedding is not None and model is not None:
        vocabulary, width = embedding.weight.shape
        config.check_fits(width, vocabulary, depth_for(config, model))


def _is_here(name: str, hub: Hub) -> bool:
    """Whether nothing of a repository is checked before it is loaded."""
    # A GGUF file's metadata comes with its weights.
    return hub.offline or hub_gguf(name) is not None or hub.downloaded(name) is not None


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model which mlx-lm loads, and not a drafter's."""
    names = config.get("architectures") or ()
    if DRAFTER_FIELDS & config.keys() or any(name in ARCHITECTURES for name in names):
        return False
    with suppress(KeyError, TypeError, ValueError):  # mlx-lm's, for what it does not know
        return classes_of(dict(config)) is not None
    return False


def depth_for(config: DraftConfig, model: Any) -> int:
    """The number of layers to compare a drafter's with.

    A model that loops over its layers has as many caches as it runs layers.
    """
    caches = model.make_cache() if hasattr(model, "make_cache") else ()
    depths = [max(len(model.layers), len(caches)), len(model.layers)]
    return depths[config.num_target_layers == depths[1]]


def model_of(name: str, config: dict[str, Any]) -> nn.Module:
    """The mlx-lm model of a config.json, with weights that are never computed.

    Raises `ConfigError` where this mlx-lm has no such model.
    """
    wrong = f"{name}: mlx-lm {version('mlx-lm')} cannot run it, so nothing is downloaded"
    with ErrorWrapper(ConfigError, wrong):
        model_class, arguments = classes_of(config := spelled_for(config))
        model: nn.Module = model_class(arguments.from_dict(config))
        complete(name, model, config)
    return model
