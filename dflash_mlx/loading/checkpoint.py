"""A folder -> the network that its config and its tensors call for, target or drafter."""

from __future__ import annotations

import glob
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer

from ..errors import ConfigError, ModelNotFoundError, WeightsError
from ..targets.internals import classes_of
from ..validation import ErrorWrapper
from .soundness import check_types


def read_target(
    name: str, folder: Path, weights: Sequence[Path]
) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of a folder with these weight files, still on disk, and its config.

    Raises: `ConfigError`, `WeightsError`.
    """
    for file in weights:
        load_file(file)  # what MLX has against a file is its, not the config's
    fresh: dict[str, mx.Dtype] = {}  # by parameter, of the model before its weights came

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, args_class = classes_of(config)

        def make(args: Any) -> nn.Module:
            model = model_class(args)
            fresh.update((path, value.dtype) for path, value in tree_flatten(model.parameters()))
            return model

        return make, args_class

    with (
        ErrorWrapper(ConfigError, f"{folder / 'config.json'}: mlx-lm cannot load it"),
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
    with ErrorWrapper(ConfigError, f"{folder}: the tokenizer cannot be read"):
        # Else transformers asks at the terminal whether to run the code that came with it.
        # Nor is it to warn of long texts: what a target can read is judged by its context.
        extra = {"trust_remote_code": False, "model_max_length": sys.maxsize}
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


def load_file(file: Path) -> dict[str, mx.array]:
    """A file's tensors by name; nothing but its header is read yet. Raises `WeightsError`."""
    with ErrorWrapper(WeightsError, f"{file}: the weights cannot be read"):
        return cast(dict[str, mx.array], mx.load(str(file)))
