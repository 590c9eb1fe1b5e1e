"""A GGUF file's metadata and the places of its tensors, every number checked before it is used.

The format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. The gguf
package knows its types. Its own reader trusts the file and makes an array of every token, which
takes a minute for a vocabulary of 262,144; this one takes a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from ...errors import WeightsError
from ...validation import ErrorWrapper

MAX_ENTRIES = 2**16  # metadata keys, or tensors; real files have a few hundred
MAX_ITEMS = 2**24  # of an array; the largest vocabularies have 300,000 tokens
MAX_TEXT = 2**26  # bytes; a chat template has some thousands
MAX_DIMENSIONS = 4
# What a header's own numbers raise in `_Reader`, which reads them as they are.
HEADER_ERRORS = (ArithmeticError, LookupError, MemoryError, OSError, TypeError, ValueError)
_BASE_MODEL = re.compile(r"general\.(base_model\.\d+|source)\.repo_url")
_SCALARS = dict(zip(GGUFValueType, "BbHhIif?__Qqd", strict=True))  # codes of NumPy


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in its file.

    Attributes:
        type: how its weights are stored.
        shape: in MLX's order, the slowest dimension first.
        start: offset of its first byte.
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def size(self) -> int:
        """Its bytes."""
        weights, block = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // weights * block

    def blocks(self) -> np.ndarray:
        """Its blocks [count, bytes per block] uint8, memory-mapped."""
        shape = (-1, GGML_QUANT_SIZES[self.type][1])
        return np.memmap(self.file, np.uint8, "r", self.start, self.size).reshape(shape)


@dataclass(frozen=True)
class Header:
    """A GGUF file's metadata by key and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(parts: Sequence[Path]) -> Header:
    """Read the header of a GGUF file, or of all its parts; compare their sizes with the tensors.

    Raises `WeightsError`: not a GGUF file, truncated, or a number in it that cannot be true.
    """
    headers = [_read(part) for part in parts]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if len(tensors) < sum(len(header.tensors) for header in headers):
        raise WeightsError(f"{parts[0]}: two of its parts have a tensor of one name.")
    return Header(headers[0].metadata, tensors)


def read_general(path: Path) -> dict[str, Any]:
    """The first keys of a file, which say what it is (`general.*`). Raises `WeightsError`."""
    return _read(path, only_general=True).metadata


def read_base_models(path: Path) -> list[str]:
    """The repositories (owner/name) that a file says it was made of; reads its first keys only.

    Raises `WeightsError`.
    """
    metadata = read_general(path)
    urls = (str(metadata[key]) for key in sorted(metadata) if _BASE_MODEL.fullmatch(key))
    return ["/".join(url.rstrip("/").split("/")[-2:]) for url in urls]


def _read(path: Path, only_general: bool = False) -> Header:
    error_prefix = f"{path}: a GGUF file with a broken header"
    with ErrorWrapper(WeightsError, error_prefix, HEADER_ERRORS), path.open("rb") as file:
        return _Reader(path, file).header(only_general)


class _Reader:
    """Reads a header from front to back. Impossible numbers raise one of `HEADER_ERRORS`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size

    def header(self, only_general: bool = False) -> Header:
        """Read the header, or only its first keys (`general.*`). Raises `WeightsError`."""
        if self._file.read(4) != b"GGUF":
            raise WeightsError(f"{self._path}: not a GGUF file.")
        version = self._integer(4)
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are read")
        tensor_count = self._count(MAX_ENTRIES)
        key_count = self._count(MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._text()
            if only_general and not key.startswith("general."):
                break
            metadata[key] = self._value()
        if only_general:
            return Header(metadata, {})
        descriptions = {}
        for _ in range(tensor_count):
            name = self._text()
            dimensions = self._count(MAX_DIMENSIONS, 4)
            sizes = [self._integer(8) for _ in range(dimensions)]
            shape = tuple(reversed(sizes))
            kind = self._integer(4)
            offset = self._integer(8)
            descriptions[name] = (shape, kind, offset)
        if len(descriptions) < tensor_count:
            raise ValueError("two tensors have one name")
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        # The tensors begin at the next multiple of the alignment.
        base = -(-self._file.tell() // alignment) * alignment
        tensors = {
            name: self._tensor(name, shape=shape, kind=kind, start=base + offset)
            for name, (shape, kind, offset) in descriptions.items()
        }
        return Header(metadata, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
        tensor = Tensor(GGMLQuantizationType(kind), shape=shape, file=self._path, start=start)
        if math.prod(shape) == 0 or shape[-1] % GGML_QUANT_SIZES[tensor.type][0]:
            raise ValueError(f"{name} of type {tensor.type.name} has the shape {shape}")
        if not 0 <= start <= self._size - tensor.size:
            raise WeightsError(
                f"{self._path}: truncated, {name} ends at byte {start + tensor.size:,} of "
                f"{self._size:,}. Download it again."
            )
        return tensor

    def _value(self) -> Any:
        kind = self._integer(4)
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._numbers(kind, 1)[0]
        kind = self._integer(4)
        count = self._count(MAX_ITEMS)
        if kind == GGUFValueType.STRING:
            return [self._text() for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(f"<{_SCALARS[GGUFValueType(kind)]}")
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()

    def _text(self) -> str:
        return self._bytes(self._count(MAX_TEXT)).decode()

    def _count(self, most: int, size: int = 8) -> int:
        """Read how many of something follow, at most `most`.

        Without a limit, a large file of zeros would fill the memory.
        """
        count = self._integer(size)
        if count > most:
            raise ValueError(f"a count of {count:,}, {most:,} at most")
        return count

    def _integer(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "little")

    def _bytes(self, count: int) -> bytes:
        content = self._file.read(count) if count <= self._size else b""
        if len(content) < count:
            raise WeightsError(
                f"{self._path}: truncated, its header is incomplete. Download it again."
            )
        return content
