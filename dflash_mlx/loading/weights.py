"""Safetensors files judged by their headers, before any of their gigabytes is read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import NotEnoughMemoryError, WeightsError
from ..validation import MAX_JSON_BYTES, brief, check_file, is_integer, parse_json, read_json
from .quantization import Quantization

GB = 1e9
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def check_safetensors(folder: Path) -> list[Path]:
    """The model*.safetensors files of a folder, each whole and none missing.

    A download that broke off leaves a file shorter than its header says; MLX would notice only in
    the middle of reading it. Raises `WeightsError`, naming the file.
    """
    found = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if os.path.lexists(index):
        _check_index(index)
    if not found:
        raise WeightsError(f"{folder}: there is no model.safetensors, the weights are missing.")
    for file in found:
        read_header(file)
    return found


def _check_index(index: Path) -> None:
    """Raise `WeightsError` unless every file that an index names is there."""
    table = read_json(index, WeightsError).get("weight_map")
    if not isinstance(table, dict) or not all(type(name) is str for name in table.values()):
        raise WeightsError(f"{index}: not a valid index of weight files.")
    present = {path.name for path in index.parent.iterdir()}
    for name in sorted({*table.values()} - present):
        raise WeightsError(f"{index.parent}: the weight file {name[:200]} is missing.")


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
            start, end = tensor["data_offsets"]
            stored = _FLOAT_BYTES.get(tensor["dtype"])
            if stored is None:
                total += end - start
                continue
            weights, shape = (end - start) // stored, tensor["shape"]
            if quantization and len(shape) > 1 and shape[-1] % quantization.group_size == 0:
                total += quantization.bytes_of(weights)
            else:
                total += weights * (float_bytes or stored)
    return math.ceil(total)


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(name: str, needed: int, limit: int, smaller: Sequence[tuple[str, int]]) -> None:
    """Raise `NotEnoughMemoryError` unless weights of `needed` bytes fit into `limit`.

    Args:
        name: the model, for the message.
        smaller: what could be done instead and the bytes it needs, the largest first.
    """
    if needed <= limit:
        return
    fits = next((advice for advice in smaller if advice[1] <= limit), None)
    if fits is not None:
        remedy = f"{fits[0]} they would take {fits[1] / GB:.1f} GB"
    elif smaller:
        remedy = f"even {smaller[-1][0]} they would take {smaller[-1][1] / GB:.1f} GB"
    else:
        remedy = "choose a smaller model or one in fewer bits"
    raise NotEnoughMemoryError(
        f"{name}: the weights take {needed / GB:.1f} GB, this machine has {limit / GB:.1f} GB; "
        f"{remedy}."
    )


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """A file's tensors (dtype, shape, data_offsets), after comparing its size with them.

    Raises `WeightsError`.
    """
    try:
        size = check_file(file, WeightsError)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise WeightsError(
                    f"{file}: truncated, its header is not whole. Download it again."
                )
            if length > MAX_JSON_BYTES:
                raise WeightsError(f"{file}: not a safetensors file, its header is too long.")
            tensors = parse_json(stream.read(length), file, WeightsError)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read ({error.strerror}).") from error
    if not isinstance(tensors, dict):
        raise WeightsError(f"{file}: not a safetensors file, its header is broken.")
    tensors.pop("__metadata__", None)
    for name, tensor in tensors.items():
        if not _is_tensor(tensor):
            raise WeightsError(
                f"{file}: not a safetensors file, its header is broken at {brief(name)}."
            )
    expected = 8 + length + max((one["data_offsets"][1] for one in tensors.values()), default=0)
    if size < expected:
        raise WeightsError(f"{file}: truncated, {size:,} bytes of {expected:,}. Download it again.")
    return tensors


def _is_tensor(entry: Any) -> bool:
    """Whether an entry of a header says what a tensor is; MLX compares shape and bytes."""
    if not isinstance(entry, dict) or type(entry.get("dtype")) is not str:
        return False
    shape, place = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not all(is_integer(size, 0) for size in shape):
        return False
    if not isinstance(place, list) or len(place) != 2:
        return False
    return all(is_integer(offset, 0, 2**63) for offset in place) and place[0] <= place[1]
