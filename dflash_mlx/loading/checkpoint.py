"""A folder -> the network that its config and its tensors call for, target or drafter."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model, load_tokenizer

from ..drafter.config import DraftConfig
from ..drafter.dflash2 import network_for
from ..drafter.network import DFlash
from ..errors import ConfigError, ModelNotFoundError, WeightsError
from ..foreign import Foreign
from .inspect import EMBEDDING, HEAD
from .soundness import check_types
from .weights import check_safetensors


def read_target(
    name: str, folder: Path, weights: Sequence[Path]
) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of a folder with these weight files, still on disk, and its config.

    Raises: `ConfigError`, `WeightsError`.
    """
    for file in weights:
        _load(file)  # what MLX has against a file is its, not the config's
    fresh: dict[str, mx.Dtype] = {}  # by parameter, of the model before its weights came

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, args_class = _get_classes(config)

        def make(args: Any) -> nn.Module:
            model = model_class(args)
            fresh.update((path, value.dtype) for path, value in tree_flatten(model.parameters()))
            return model

        return make, args_class

    with (
        Foreign(ConfigError, f"{folder / 'config.json'}: mlx-lm cannot load it"),
        _without_wildcards(folder) as place,
    ):
        model, config = load_model(place, lazy=True, get_model_classes=classes)
    integers = {path for path, dtype in fresh.items() if not mx.issubdtype(dtype, mx.floating)}
    check_types(name, model, integers)
    return model, config


def read_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """mlx-lm's tokenizer of a folder. Raises: `ModelNotFoundError`, `ConfigError`."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelNotFoundError(f"{folder}: there is no tokenizer.json, the tokenizer is missing.")
    with Foreign(ConfigError, f"{folder}: the tokenizer cannot be read"):
        # Else transformers asks at the terminal whether to run the code that came with it.
        extra = {"trust_remote_code": False}
        return load_tokenizer(folder, extra, eos_token_ids=config.get("eos_token_id"))


@contextmanager
def _without_wildcards(folder: Path) -> Iterator[Path]:
    """A path of the folder that mlx-lm can look for files in: it takes [a] for a pattern."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "model"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link  # MLX has opened the files when it is gone


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
        weights.update(_load(file))
    return weights


def _load(file: Path) -> dict[str, mx.array]:
    """A file's tensors by name; nothing but its header is read yet. Raises `WeightsError`."""
    with Foreign(WeightsError, f"{file}: the weights cannot be read"):
        return cast(dict[str, mx.array], mx.load(str(file)))


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
