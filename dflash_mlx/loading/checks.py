"""Checks of a model's files and size before its weights are read: no MLX, only headers and JSON."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, ModelNotFoundError, NotEnoughMemoryError, WeightsError
from ..machine.facts import memory_bytes, usable_bytes
from ..validation import (
    MAX_BYTES,
    MAX_JSON_BYTES,
    brief,
    check_file,
    is_integer,
    parse_json,
    read_json,
)
from .quantization import Quantization

GB = 1e9
YES, NO = "yes", "no"
ON_MAC = sys.platform == "darwin"
WHETHER = f"fits this {'Mac' if ON_MAC else 'machine'}"
MOST_LAYERS = 4096  # mlx-lm builds every layer before it compares the weights with the config
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_BYTES = _FLOAT_BYTES | {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_STORED = 2  # bytes per weight, as published
# Files that mlx-lm and transformers open by themselves.
_READ_BY_OTHERS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# Names of quantized conversions: Qwen3-8B-4bit, gpt-oss-20b-MXFP4-Q8.
_QUANTIZED = re.compile(r"-(\d[_-]?bits?|q\d|mxfp\d|nvfp4|fp8|awq|dwq)\b")


def read_target_config(folder: Path) -> dict[str, Any]:
    """The config.json of a target's folder. Raises `ModelNotFoundError`, `ConfigError`.

    Every file that mlx-lm or transformers will open must be an ordinary file of reasonable size:
    they would wait for a pipe and read an endless device.
    """
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise ModelNotFoundError(f"{folder}: there is no config.json.")
    for file in sorted(file for pattern in _READ_BY_OTHERS for file in folder.glob(pattern)):
        try:
            size = check_file(file)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror}).") from error
        if size > MAX_JSON_BYTES:
            raise ConfigError(f"{file}: {size:,} bytes are too many for a file of this kind.")
    config = read_json(path)
    for part in (config, config.get("text_config")):
        if part is not None and not isinstance(part, dict):
            raise ConfigError(f"{path}: text_config must be an object, not {brief(part)}.")
        layers = (part or {}).get("num_hidden_layers", 1)
        if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
            raise ConfigError(
                f"{path}: num_hidden_layers must be a whole number from 1 to {MOST_LAYERS:,}, "
                f"not {brief(layers)}."
            )
    return config


def check_safetensors(folder: Path) -> list[Path]:
    """The model*.safetensors files of a folder, all present and none truncated.

    If there is an index, files that it does not name are left out: they may be of another download.
    A broken download leaves a file shorter than its header says; MLX would notice only in the
    middle of reading it. Raises `WeightsError`, naming the file.
    """
    found = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if os.path.lexists(index):
        table = read_json(index, WeightsError).get("weight_map")
        if not isinstance(table, dict) or not all(type(name) is str for name in table.values()):
            raise WeightsError(f"{index}: not a valid index of weight files.")
        for name in sorted({*table.values()} - {file.name for file in folder.iterdir()}):
            raise WeightsError(f"{folder}: the weight file {name[:200]} is missing.")
        found = [file for file in found if file.name in table.values()]
    if not found:
        raise WeightsError(f"{folder}: there is no model.safetensors, the weights are missing.")
    for file in found:
        read_header(file)
    return found


class StoredTensor(NamedTuple):
    """What a safetensors header says of a tensor; `size` is in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """A safetensors file's tensors by name.

    Raises `WeightsError` if it is not such a file, or shorter than its tensors.
    """
    try:
        size = check_file(file, WeightsError)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise WeightsError(
                    f"{file}: truncated, its header is incomplete. Download it again."
                )
            if length > MAX_JSON_BYTES:
                raise WeightsError(f"{file}: not a safetensors file, its header is too long.")
            content = parse_json(stream.read(length), file, WeightsError)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read ({error.strerror}).") from error
    tensors, end = dict[str, StoredTensor](), 0
    for name, said in content.items() if isinstance(content, dict) else [("it", content)]:
        if name == "__metadata__":
            continue
        found = _stored_tensor(said)
        if found is None:
            raise WeightsError(
                f"{file}: not a safetensors file, its header is broken ({brief(name)} is "
                f"{brief(said)})."
            )
        tensors[name], end = found, max(end, said["data_offsets"][1])
    if size < 8 + length + end:
        raise WeightsError(
            f"{file}: truncated, {size:,} bytes of {8 + length + end:,}. Download it again."
        )
    return tensors


def _stored_tensor(said: Any) -> StoredTensor | None:
    """A header's entry; None for one that is broken."""
    if not isinstance(said, dict):
        return None
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if type(dtype) is not str or not isinstance(shape, list) or not isinstance(offsets, list):
        return None
    whole = all(is_integer(number, 0, MAX_BYTES) for number in (*shape, *offsets))
    if not whole or len(offsets) != 2 or (size := offsets[1] - offsets[0]) < 0:
        return None
    width = _BYTES.get(dtype)
    fits = width is None or math.prod(shape) * width == size
    return StoredTensor(dtype, tuple(shape), size) if fits else None


def memory_needed(
    files: Iterable[Path], quantization: Quantization | None = None, float_bytes: int | None = None
) -> int:
    """Bytes that the weights of safetensors files take once loaded, from the headers alone.

    Args:
        files: the weight files.
        quantization: what happens to the matrices on load, None for nothing.
        float_bytes: the width that floating-point weights are cast to, None for their own.
    """
    total = 0.0
    for file in files:
        for tensor in read_header(file).values():
            stored, shape = _FLOAT_BYTES.get(tensor.dtype), tensor.shape
            if tensor.dtype == "F8_E4M3":
                stored, tensor = _STORED, tensor._replace(size=_STORED * tensor.size)
            if stored is None:
                total += tensor.size
                continue
            weights = tensor.size // stored
            if quantization and len(shape) > 1 and shape[-1] % quantization.group_size == 0:
                total += quantization.bytes_of(weights)
            else:
                total += weights * (float_bytes or stored)
    return math.ceil(total)


def check_memory(name: str, needed: int, in_4_bits: int | None = None) -> None:
    """Raise `NotEnoughMemoryError` unless weights fit into the memory that models may take.

    Args:
        name: the model, for the message.
        needed: bytes of the weights.
        in_4_bits: their bytes if they were quantized to 4 bits; None where they cannot be.
    """
    limit, remedy = usable_bytes(), "choose a smaller model or one in fewer bits"
    if needed <= limit:
        return
    if in_4_bits is not None:
        even = "" if in_4_bits <= limit else "even "
        remedy = f"{even}quantized to 4 bits they would take {in_4_bits / GB:.1f} GB"
    has = "this machine has" if limit == memory_bytes() else "this Mac's GPU may use"
    raise NotEnoughMemoryError(
        f"{name}: the weights take {needed / GB:.1f} GB, {has} {limit / GB:.1f} GB; {remedy}."
    )


def fits(size: float, quantized: bool = False, limit: int | None = None, mac: bool = ON_MAC) -> str:
    """Whether a target fits: "yes", "no", or the option it needs, as "with --target-bits 8".

    The limit is the one that loading enforces. On a CPU, unquantized weights compute in f32.

    Args:
        size: bytes of the weights as stored.
        quantized: whether they are quantized already; otherwise they take two bytes each.
        limit: bytes that models may take, None for this machine's.
        mac: whether they run on a Mac.
    """
    limit = usable_bytes() if limit is None else limit
    if size * (1 if quantized or mac else 2) <= limit:
        return YES
    for bits in () if quantized else (8, 4):
        if Quantization(bits, 64).bytes_of(1) * size / _STORED <= limit:
            return f"with --target-bits {bits}"
    return NO


def fits_here(size: float, quantized: bool = False) -> str:
    """Whether a target of this many bytes fits this machine, for a message."""
    return f"{WHETHER}: {fits(size, quantized)}"


def looks_quantized(name: str) -> bool:
    """Whether a model's name says that it is quantized; its config.json is not here yet."""
    return _QUANTIZED.search(name.lower()) is not None
