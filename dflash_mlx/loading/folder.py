"""Reads the folder of a model without MLX: its config and headers, before any weight is read."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ..errors import ConfigError, ModelNotFoundError, SettingsError, WeightsError
from ..settings import RequestSettings
from ..validation import (
    MAX_JSON_BYTES,
    ErrorWrapper,
    brief,
    check_file,
    is_integer,
    read_json,
    text_config,
)
from .contents import Contents, config_contents
from .quantization import Quantization, are_plain, is_fp8, is_quantized, read_modelopt

INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
# The file in which ModelOpt describes the quantization of the weights.
MODELOPT_CONFIG = "hf_quant_config.json"
# A limit, because mlx-lm builds every layer before it compares the weights with the config.
MAX_LAYERS = 4096
# The sampling settings that generation_config.json may name.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TAGGED_FLOATS = ("Infinity", "-Infinity", "NaN")
# Types of weights that are cast, or may be quantized, on load.
_FLOATS = ("F32", "F16", "BF16", "F8_E4M3")
_DTYPE_BITS = re.compile(r"\d+")
# Files that mlx-lm and transformers open themselves.
_READ_BY_LIBRARIES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


class StoredTensor(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def width(self) -> float:
        """The size of an element in bytes: 2 for BF16, 1 for F8_E4M3 and BOOL."""
        bits = _DTYPE_BITS.search(self.dtype)
        return int(bits[0]) / 8 if bits else 1


class Folder:
    """The folder of a model. Each file is read once, when it is first needed.

    Args:
        path: the folder.
        name: the name that the user gave.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    def converted(self, unpacked: bool) -> Folder:
        """This folder, because its weights are safetensors. A GGUF file is converted here."""
        return self

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json. Raises `ModelNotFoundError`, `ConfigError`.

        Every file that mlx-lm or transformers will open must be a regular file of reasonable size,
        because they would wait for a pipe and read a device forever.
        """
        path = self.path / "config.json"
        if not os.path.lexists(path):
            raise ModelNotFoundError(f"{self.path}: there is no config.json.")
        read_by_libraries: list[Path] = []
        for pattern in _READ_BY_LIBRARIES:
            read_by_libraries += self.path.glob(pattern)
        for file in sorted(read_by_libraries):
            try:
                size = check_file(file)
            except OSError as error:
                raise ConfigError(f"{file}: cannot be read ({error.strerror}).") from error
            if size > MAX_JSON_BYTES:
                raise ConfigError(f"{file}: {size:,} bytes are too many for a file of this kind.")
        config = _untagged(read_json(path))
        for part in (config, config.get("text_config")):
            if part is not None and not isinstance(part, dict):
                raise ConfigError(f"{path}: text_config must be an object, not {brief(part)}.")
            layers = (part or {}).get("num_hidden_layers", 1)
            if not is_integer(layers, 1, MAX_LAYERS):
                raise ConfigError(
                    f"{path}: num_hidden_layers must be a whole number from 1 to {MAX_LAYERS:,}, "
                    f"not {brief(layers)}."
                )
        return self._with_quantization(config)

    def _with_quantization(self, config: dict[str, Any]) -> dict[str, Any]:
        """Correct what a config says about the quantization of this folder's weights.

        ModelOpt describes it in a separate file. Some configs still name a quantization although
        the weights have been dequantized since: that is dropped with a warning.
        """
        parts = [part for part in (config, text_config(config)) if "quantization_config" in part]
        file = self.path / MODELOPT_CONFIG
        if not parts and "quantization" not in config and file.is_file():
            described = read_modelopt(read_json(file), file)
            return config if described is None else config | {"quantization_config": described}
        if not parts:
            return config
        types: dict[str, str] = {}
        for weights in self.path.glob("model*.safetensors"):
            types |= {name: tensor.dtype for name, tensor in self.header(weights).items()}
        if not are_plain(types):
            return config
        named = parts[0]["quantization_config"] or {}
        method = named.get("quant_method", named.get("quant_algo"))
        warnings.warn(
            f"dflash-mlx: {self.path / 'config.json'} names a quantization ({brief(method)}), but "
            "the weights are plain: they are read as they are.",
            stacklevel=3,
        )
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        text = config.get("text_config")
        if isinstance(text, dict):
            kept = {name: value for name, value in text.items() if name != "quantization_config"}
            plain["text_config"] = kept
        return plain

    @property
    def contents(self) -> Contents:
        """What the folder contains: a model, or something else. Raises the errors of `config`."""
        return config_contents(self.config)

    @cached_property
    def index(self) -> dict[str, str] | None:
        """The file of each tensor according to the index; None without an index.

        Raises `WeightsError`.
        """
        path = self.path / INDEX
        if not os.path.lexists(path):
            return None
        table = read_json(path, WeightsError).get("weight_map")
        if not isinstance(table, dict) or not all(type(name) is str for name in table.values()):
            raise WeightsError(f"{path}: not a valid index of weight files.")
        return table

    @cached_property
    def files(self) -> list[Path]:
        """The model*.safetensors files, all present and none truncated.

        If there is an index, files that it does not name are left out, because they may be from
        another download. An interrupted download leaves a file that is shorter than its header
        says, which MLX would notice only in the middle of reading it.

        Raises:
            WeightsError: a file is missing or truncated.
        """
        files = sorted(self.path.glob("model*.safetensors"))
        if self.index is not None:
            indexed = set(self.index.values())
            missing = sorted(indexed - {file.name for file in self.path.iterdir()})
            if missing:
                raise WeightsError(f"{self.path}: the weight file {missing[0][:200]} is missing.")
            files = [file for file in files if file.name in indexed]
        if not files:
            raise WeightsError(
                f"{self.path}: there is no model.safetensors, the weights are missing."
            )
        for file in files:
            self.header(file)
        return files

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of `files`, by name. Raises `WeightsError`."""
        tensors: dict[str, StoredTensor] = {}
        for file in self.files:
            tensors |= self.header(file)
        return tensors

    @property
    def every_tensor(self) -> dict[str, StoredTensor]:
        """The tensors of all safetensors files: some heads are in a file that no index names."""
        tensors: dict[str, StoredTensor] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            tensors |= self.header(file)
        return tensors

    def header(self, file: Path) -> dict[str, StoredTensor]:
        """The tensors of a safetensors file by name, read once. Raises `WeightsError`."""
        if file not in self._headers:
            self._headers[file] = read_tensors_of_file(file)
        return self._headers[file]

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are quantized and stay so when they are loaded."""
        return is_quantized(self.config)

    def memory(
        self, quantization: Quantization | None = None, float_bytes: int | None = None
    ) -> int:
        """The size of the weights once loaded, in bytes. The arguments are `memory_needed`'s."""
        return memory_needed(self.tensors.values(), quantization, float_bytes)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json; empty, with a warning, if it cannot be read."""
        path = self.path / GENERATION_CONFIG
        if not path.is_file():
            return {}
        try:
            return read_json(path)
        except ConfigError as error:
            warnings.warn(f"dflash-mlx: {path} is not used: {error}", stacklevel=2)
            return {}

    @property
    def end_tokens(self) -> list[int] | None:
        """The ids that end a text, in addition to the tokenizer's; None if no file names any.

        As in mlx-lm, the first file that names any decides: generation_config.json, then
        config.json. Last comes `text_config`, which transformers reads and mlx-lm does not.

        Raises:
            ConfigError: an id is not an integer.
        """
        sources = (
            (GENERATION_CONFIG, self.generation_config),
            ("config.json", self.config),
            ("config.json", text_config(self.config)),
        )
        for file, values in sources:
            ids = values.get("eos_token_id")
            if ids is None or ids == []:
                continue
            ids = ids if isinstance(ids, list) else [ids]
            # -1 stands for no token. What is outside of the vocabulary is ignored.
            if not all(is_integer(number, least=-1) for number in ids):
                raise ConfigError(
                    f"{self.path / file}: eos_token_id must be a token's number or a list of them, "
                    f"not {brief(values['eos_token_id'])}."
                )
            return ids
        return None

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The sampling settings of generation_config.json, for `RequestSettings`.

        Empty if there is no such file, if it says that the model decodes greedily, or, with a
        warning, if its settings are invalid.
        """
        config = self.generation_config
        try:
            defaults = {name: config[name] for name in SAMPLING if config.get(name) is not None}
            samples = config.get("do_sample")
            if samples is True:
                defaults = {"temperature": 1.0} | defaults  # transformers' default
            elif samples is False or "temperature" not in defaults:
                penalty = defaults.get("repetition_penalty")
                defaults = {} if penalty is None else {"repetition_penalty": penalty}
            if isinstance(defaults.get("top_k"), int):
                defaults["top_k"] = max(0, defaults["top_k"])  # vLLM writes -1 for off
            RequestSettings(**defaults)
        except SettingsError as error:
            path = self.path / GENERATION_CONFIG
            warnings.warn(f"dflash-mlx: {path} is not used: {error}", stacklevel=2)
            return {}
        return defaults


def _untagged(value: Any) -> Any:
    """Convert transformers' form of special floats, {"__float__": "NaN"}, in a JSON value."""
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in _TAGGED_FLOATS:
        return float(value["__float__"])
    return {name: _untagged(item) for name, item in value.items()}


class RemoteFolder(Folder):
    """A model on the hub whose weights are not downloaded yet.

    Args:
        path: the folder with its config.json and index. For a GGUF file, it does not exist.
        name: the name that the user gave.
        remote_bytes: returns the size of its weights on the hub.
    """

    def __init__(self, path: Path, name: str, remote_bytes: Callable[[], int]) -> None:
        super().__init__(path, name)
        self._remote_bytes = remote_bytes

    def memory(
        self, quantization: Quantization | None = None, float_bytes: int | None = None
    ) -> int:
        """The size of the weights once loaded, estimated from the size of the files."""
        size = self._remote_bytes()
        if self.is_quantized:
            return size
        bytes_per_weight = 1 if is_fp8(self.config) else 2
        weights = size // bytes_per_weight
        if quantization is not None:
            return math.ceil(quantization.quantized_bytes(weights))
        return weights * (float_bytes or 2)


def read_tensors_of_file(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file by name.

    Raises:
        WeightsError: it is not a safetensors file, or it is truncated.
    """
    error_prefix = f"{file}: truncated, or not a safetensors file. Download it again"
    with ErrorWrapper(WeightsError, error_prefix, (OSError, SafetensorError)):
        check_file(file, WeightsError)
        with safe_open(file, "np") as stored:
            tensors = {}
            for name in stored.keys():
                tensor = stored.get_slice(name)
                shape = tuple(tensor.get_shape())
                tensors[name] = StoredTensor(name, file=file, dtype=tensor.get_dtype(), shape=shape)
            return tensors


def memory_needed(
    tensors: Iterable[StoredTensor],
    quantization: Quantization | None = None,
    float_bytes: int | None = None,
) -> int:
    """The size of tensors once loaded, in bytes.

    Args:
        tensors: the stored tensors. 8-bit floats become 16-bit ones.
        quantization: how the matrices are quantized on load, None for not at all.
        float_bytes: the width that floating-point weights are cast to, None to keep it.
    """
    total = 0.0
    for tensor in tensors:
        count = math.prod(tensor.shape)
        shape = tensor.shape
        if tensor.dtype not in _FLOATS:
            total += count * tensor.width
        elif quantization and len(shape) > 1 and shape[-1] % quantization.group_size == 0:
            total += quantization.quantized_bytes(count)
        else:
            total += count * (float_bytes or max(2, tensor.width))
    return math.ceil(total)
