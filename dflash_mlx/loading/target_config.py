"""A target's folder judged before mlx-lm builds a model of it: its files, sizes and numbers.

mlx-lm's models trust their config. A field is used where it is first needed, as a Python loop or
as a shape, so `num_hidden_layers: 2**31` makes layers until the memory is gone. The weights say how
large a model can be at most: every layer has a tensor, and every unit of a size a bit. What is
within these bounds costs little to build, for MLX's arrays are lazy, and mlx-lm then compares every
shape with that of its tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ModelNotFoundError
from ..validation import MAX_JSON_BYTES, brief, check_file, is_finite, read_json
from .weights import read_header

# What is counted one by one, in Python: the loops of mlx-lm's models run over these.
_COUNTS = re.compile(r"(num|n)_(\w+_)?layers?|max_window_layers|depth|\w+_iters|num_loops|loop_num")
_SIZES = re.compile(
    r"(\w+_)?(num|n)_(\w+_)?(heads?|experts?|groups?)|n_embd|d_model|hc_mult|(\w+_)?(dim|rank)"
    r"|\w*(hidden|intermediate|vocab|embedding)_size\w*"
)
_POSITIVE = re.compile(r"hidden_size|vocab_size|num_hidden_layers|num_attention_heads")
_FINITE = re.compile(r"(\w+_)?(rope_theta|eps|epsilon)|rope_\w*base\w*")
_FEW = 256  # layers and rounds that are built at once, whatever the weights are
# The files that mlx-lm and transformers open by themselves.
_READ_BY_OTHERS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def read_target_config(folder: Path, weights: Iterable[Path]) -> dict[str, Any]:
    """The config.json of a folder, its numbers within what these weight files can hold.

    Raises: `ModelNotFoundError` without one, `ConfigError`.
    """
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise ModelNotFoundError(f"{folder}: there is no config.json.")
    _check_files(folder)
    config = read_json(path)
    _check_text_config(config, path)
    tensors = [tensor for file in weights for tensor in read_header(file).values()]
    sizes = [tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors]
    _check_numbers(config, max(len(tensors), _FEW), 8 * sum(sizes), path)
    generation = folder / "generation_config.json"
    if generation.exists():
        end = read_json(generation).get("eos_token_id")
        _check_end(end, generation)
    _check_end(config.get("eos_token_id"), path)
    return config


def _check_files(folder: Path) -> None:
    """Raise `ConfigError` for what would wait, or fill the memory, when others read it."""
    for pattern in _READ_BY_OTHERS:
        for path in sorted(folder.glob(pattern)):
            try:
                size = check_file(path)
            except OSError as error:
                raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
            if size > MAX_JSON_BYTES:
                raise ConfigError(f"{path}: {size:,} bytes are more than a file of its kind has.")


def _check_text_config(config: Mapping[str, Any], path: Path) -> None:
    """Raise `ConfigError` unless the parts that the loader itself reads are what they should be."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ConfigError(f"{path}: text_config must be an object, not {brief(text)}.")
    for part in (config, text or {}):
        length = part.get("max_position_embeddings")
        if length is not None and not (is_finite(length) and length >= 1):
            raise ConfigError(
                f"{path}: max_position_embeddings must be a number of at least 1, "
                f"not {brief(length)}."
            )


def _check_numbers(config: Mapping[str, Any], layers: int, bits: int, path: Path) -> None:
    """Raise `ConfigError` for a number that no model with so many layers and bits can have."""
    for name, value in _numbers(config):
        wrong = f"{path}: {name} must be"
        counted = _COUNTS.fullmatch(name) is not None
        if counted or _SIZES.fullmatch(name):
            least = 1 if _POSITIVE.fullmatch(name) else 0
            if isinstance(value, str) or not value >= least:
                raise ConfigError(f"{wrong} a number of at least {least}, not {brief(value)}.")
            most = layers if counted else bits
            if value > most:
                raise ConfigError(
                    f"{path}: {name} is {brief(value)}, and the weights are those of a smaller "
                    "model."
                )
        elif _FINITE.fullmatch(name) and not (is_finite(value) and value >= 0):
            raise ConfigError(f"{wrong} a finite number of at least 0, not {brief(value)}.")
        elif isinstance(value, float) and value != value:
            raise ConfigError(f"{wrong} a number, not NaN.")


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value of a config by the name of its field, wherever it is nested; no null."""
    todo: list[Any] = [config]
    while todo:
        for name, value in todo.pop().items():
            values = value if isinstance(value, list) else [value]
            todo += [one for one in values if isinstance(one, dict)]
            yield from ((name, one) for one in values if not isinstance(one, dict | list | None))


def _check_end(end: Any, path: Path) -> None:
    """Raise `ConfigError` unless these are the token ids that end a text, or none."""
    ids = end if isinstance(end, list) else [] if end is None else [end]
    if not all(type(one) is int for one in ids):
        raise ConfigError(
            f"{path}: eos_token_id must be a token id or a list of them, not {brief(end)}."
        )
