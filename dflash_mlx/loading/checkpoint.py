"""A drafter's folder -> the network that its config and its tensors call for."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.config import DraftConfig
from ..drafter.dflash2 import network_for
from ..drafter.network import DFlash
from ..errors import WeightsError
from .inspect import EMBEDDING, HEAD
from .weights import check_safetensors


def read_drafter(folder: Path) -> DFlash:
    """The drafter of a folder, its weights as they are stored and still on disk.

    Raises: `ConfigError`, `WeightsError`.
    """
    config = DraftConfig.from_file(folder / "config.json")
    weights = _tensors(folder)
    drafter = network_for(config)(
        config, own_embedding=EMBEDDING in weights, own_head=HEAD in weights
    )
    if config.quantization is not None:
        _quantize_as_stored(drafter, config, weights)
    _check_tensors(drafter, weights, folder)
    drafter.load_weights(list(weights.items()))
    return drafter


def _tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a folder by name; nothing but headers is read yet."""
    weights: dict[str, mx.array] = {}
    for file in check_safetensors(folder):
        try:
            weights.update(cast(dict[str, mx.array], mx.load(str(file))))
        except RuntimeError as error:
            problem = str(error).splitlines()[0][:200].rstrip(".")
            raise WeightsError(f"{file}: the weights cannot be read ({problem}).") from error
    return weights


def _check_tensors(drafter: DFlash, weights: dict[str, mx.array], folder: Path) -> None:
    """Raise `WeightsError`, naming the tensor, unless the config calls for these tensors."""
    wrong = f"{folder}: the weights do not fit the config, the tensor"
    expected = dict(tree_flatten(drafter.parameters()))
    for name in sorted(expected.keys() ^ weights.keys()):
        problem = "is missing" if name in expected else "has no place in this drafter"
        raise WeightsError(f"{wrong} {name} {problem}.")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise WeightsError(f"{wrong} {name} is {tensor.shape} and not {expected[name].shape}.")


def _quantize_as_stored(drafter: DFlash, config: DraftConfig, weights: dict[str, mx.array]) -> None:
    """Give the layers that were stored quantized the shape their tensors have."""
    stored = dict(config.quantization or {})

    def predicate(name: str, module: nn.Module) -> bool | dict[str, object]:
        # A layer may have an entry of its own, as in mlx-lm's mixed quantizations.
        return f"{name}.scales" in weights and stored.get(name, True)

    nn.quantize(
        drafter,
        group_size=stored["group_size"],
        bits=stored["bits"],
        mode=stored.get("mode", "affine"),
        class_predicate=predicate,
    )
