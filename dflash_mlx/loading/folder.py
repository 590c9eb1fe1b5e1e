"""A model's folder, read once and without MLX: what its files say before a weight is read."""

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
from .contents import Contents, of_config
from .quantization import Quantization, are_plain, is_fp8, is_quantized, of_modelopt

INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
QUANTIZATION = "hf_quant_config.json"  # ModelOpt's
MOST_LAYERS = 4096  # mlx-lm builds every layer before it compares the weights with the config
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TAGGED_FLOATS = ("Infinity", "-Infinity", "NaN")
_FLOATS = ("F32", "F16", "BF16", "F8_E4M3")
_BITS = re.compile(r"\d+")  # in the name of a dtype
# Files that mlx-lm and transformers open by themselves.
_READ_BY_OTHERS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


class StoredTensor(NamedTuple):
    """What a safetensors header says of a tensor."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def width(self) -> float:
        """Bytes of an element: BF16 has 2, F8_E4M3 has 1."""
        bits = _BITS.search(self.dtype)
        return int(bits[0]) / 8 if bits else 1  # BOOL


class Folder:
    """A model's folder. Each file is read once, when it is first asked about.

    Args:
        path: the folder.
        name: the model, as it was named.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    def converted(self, unpacked: bool) -> Folder:
        """A folder of safetensors; `unpacked` as for a GGUF file."""
        return self

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json. Raises `ModelNotFoundError`, `ConfigError`.

        Every file that mlx-lm or transformers will open must be an ordinary file of reasonable
        size: they would wait for a pipe and read an endless device.
        """
        path = self.path / "config.json"
        if not os.path.lexists(path):
            raise ModelNotFoundError(f"{self.path}: there is no config.json.")
        others = (file for pattern in _READ_BY_OTHERS for file in self.path.glob(pattern))
        for file in sorted(others):
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
            if not is_integer(layers, 1, MOST_LAYERS):
                raise ConfigError(
                    f"{path}: num_hidden_layers must be a whole number from 1 to {MOST_LAYERS:,}, "
                    f"not {brief(layers)}."
                )
        return self._with_quantization(config)

    def _with_quantization(self, config: dict[str, Any]) -> dict[str, Any]:
        """A config that says of the weights' quantization what is true of this folder.

        ModelOpt says it in a file of its own. A config that still names the quantization of
        weights that somebody has unpacked since is a warning.
        """
        parts = [part for part in (config, text_config(config)) if "quantization_config" in part]
        file = self.path / QUANTIZATION
        if not parts and "quantization" not in config and file.is_file():
            said = of_modelopt(read_json(file), file)
            return config if said is None else config | {"quantization_config": said}
        files = self.path.glob("model*.safetensors") if parts else ()
        headers = [self.header(weights) for weights in files]
        types = {name: tensor.dtype for header in headers for name, tensor in header.items()}
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
        """What it is: a model, or something else. Raises as `config`."""
        return of_config(self.config)

    @cached_property
    def index(self) -> dict[str, str] | None:
        """The file of each tensor, by the index; None without one. Raises `WeightsError`."""
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

        If there is an index, files that it does not name are left out: they may be of another
        download. A broken download leaves a file shorter than its header says; MLX would notice
        only in the middle of reading it. Raises `WeightsError`, naming the file.
        """
        found = sorted(self.path.glob("model*.safetensors"))
        if self.index is not None:
            named = {*self.index.values()}
            for name in sorted(named - {file.name for file in self.path.iterdir()}):
                raise WeightsError(f"{self.path}: the weight file {name[:200]} is missing.")
            found = [file for file in found if file.name in named]
        if not found:
            raise WeightsError(
                f"{self.path}: there is no model.safetensors, the weights are missing."
            )
        for file in found:
            self.header(file)
        return found

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of `files`, by name. Raises `WeightsError`."""
        return {name: one for file in self.files for name, one in self.header(file).items()}

    @property
    def every_tensor(self) -> dict[str, StoredTensor]:
        """The tensors of all safetensors files: some heads have one that no index names."""
        files = sorted(self.path.glob("*.safetensors"))
        return {name: one for file in files for name, one in self.header(file).items()}

    def header(self, file: Path) -> dict[str, StoredTensor]:
        """A safetensors file's tensors by name, read once. Raises as `read_header`."""
        if file not in self._headers:
            self._headers[file] = read_header(file)
        return self._headers[file]

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are quantized, also once they are loaded."""
        return is_quantized(self.config)

    def memory(
        self, quantization: Quantization | None = None, float_bytes: int | None = None
    ) -> int:
        """Bytes that the weights take once loaded, as `memory_needed` counts them."""
        return memory_needed(self.tensors.values(), quantization, float_bytes)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The generation_config.json; empty without one. One that cannot be read is a warning."""
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
        """The ids that end a text, besides the tokenizer's own end; None if no file names any.

        The first file that names any decides, as in mlx-lm: generation_config.json, then
        config.json. mlx-lm does not look into `text_config`, where transformers does, so that is
        the last one. Raises `ConfigError` for ids that are not integers.
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

        Empty if there is no such file, or it has the model decode greedily. Settings that cannot
        be used are a warning.
        """
        config = self.generation_config
        try:
            found = {name: config[name] for name in SAMPLING if config.get(name) is not None}
            samples = config.get("do_sample")
            if samples is True:
                found = {"temperature": 1.0} | found  # transformers' default
            elif samples is False or "temperature" not in found:
                found = {name: found[name] for name in found if name == "repetition_penalty"}
            if isinstance(found.get("top_k"), int):
                found["top_k"] = max(0, found["top_k"])  # -1 is off for vLLM
            RequestSettings(**found)
        except SettingsError as error:
            path = self.path / GENERATION_CONFIG
            warnings.warn(f"dflash-mlx: {path} is not used: {error}", stacklevel=2)
            return {}
        return found


def _untagged(value: Any) -> Any:
    """A JSON value whose infinite numbers are floats: transformers writes {"__float__": "NaN"}."""
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in _TAGGED_FLOATS:
        return float(value["__float__"])
    return {name: _untagged(item) for name, item in value.items()}


class Preview(Folder):
    """A model on the hub, of which the config.json and index are here; of a GGUF file, no folder.

    Args:
        remote: gives the bytes of its weights.
    """

    def __init__(self, path: Path, name: str, remote: Callable[[], int]) -> None:
        super().__init__(path, name)
        self._remote = remote

    def memory(
        self, quantization: Quantization | None = None, float_bytes: int | None = None
    ) -> int:
        """As `Folder.memory`, by the size of the files."""
        size = self._remote()
        if self.is_quantized:
            return size
        weights = size // (1 if is_fp8(self.config) else 2)
        if quantization is not None:
            return math.ceil(quantization.bytes_of(weights))
        return weights * (float_bytes or 2)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """A safetensors file's tensors by name.

    Raises `WeightsError` if it is not such a file, or shorter than its tensors.
    """
    wrong = f"{file}: truncated, or not a safetensors file. Download it again"
    with ErrorWrapper(WeightsError, wrong, (OSError, SafetensorError)):
        check_file(file, WeightsError)
        with safe_open(file, "np") as stored:
            slices = ((name, stored.get_slice(name)) for name in stored.keys())
            return {
                name: StoredTensor(
                    name, file=file, dtype=one.get_dtype(), shape=tuple(one.get_shape())
                )
                for name, one in slices
            }


def memory_needed(
    tensors: Iterable[StoredTensor],
    quantization: Quantization | None = None,
    float_bytes: int | None = None,
) -> int:
    """Bytes that tensors take once loaded.

    Args:
        tensors: as stored. 8-bit floats become 16-bit ones.
        quantization: what happens to the matrices on load, None for nothing.
        float_bytes: the width that floating-point weights are cast to, None for their own.
    """
    total = 0.0
    for tensor in tensors:
        count = math.prod(tensor.shape)
        shape = tensor.shape
        if tensor.dtype not in _FLOATS:
            total += count * tensor.width
        elif quantization and len(shape) > 1 and shape[-1] % quantization.group_size == 0:
            total += quantization.bytes_of(count)
        else:
            total += count * (float_bytes or max(2, tensor.width))
    return math.ceil(total)
