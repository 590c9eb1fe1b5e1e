"""Safetensors files checked by their headers, before any of their gigabytes is read."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import WeightsError


def check_safetensors(folder: Path) -> list[Path]:
    """The model*.safetensors files of a folder, each whole and none missing.

    A download that broke off leaves a file shorter than its header says; MLX would notice only in
    the middle of reading it. Raises `WeightsError`, naming the file.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index}: not a valid index of weight files.") from error
        for name in sorted(names):
            if not (folder / name).exists():
                raise WeightsError(f"{folder}: the weight file {name} is missing.")
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise WeightsError(f"{folder}: there is no model.safetensors, the weights are missing.")
    for file in found:
        _check_whole(file)
    return found


def _check_whole(file: Path) -> None:
    """Compare a file's size with what its header promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightsError(f"{file}: truncated, its header is not whole. Download it again.")
        try:
            tensors = json.loads(stream.read(length))
            ends = [t["data_offsets"][1] for n, t in tensors.items() if n != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{file}: not a safetensors file, its header is broken.") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise WeightsError(f"{file}: truncated, {size:,} bytes of {expected:,}. Download it again.")
