"""A GGUF file's metadata and the places of its tensors, every number checked before it is used.

The format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. The gguf
package knows its types. Its own reader trusts the file and makes an array of every token, which
takes a minute for a vocabulary of 262,144; this one takes a second.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from ...errors import WeightsError
from ...validation import ErrorWrapper

MAX_ENTRIES = 1 << 16  # metadata keys, or tensors; real files have a few hundred
MAX_ITEMS = 1 << 24  # of an array; the largest vocabularies have 300,000 tokens
MAX_TEXT = 1 << 26  # bytes of a string; a chat template has some thousands
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
_BASE_MODEL = re.compile(r"general\.(base_model\.\d+|source)\.repo_url")
_SCALARS = dict(zip(GGUFValueType, "BbHhIif?__Qqd", strict=True))  # codes of `struct`


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
    headers = []
    for part in parts:
        try:
            with part.open("rb") as file:
                headers.append(_Reader(part, file).header())
        except OSError as error:
            raise WeightsError(f"{part}: cannot be read ({error.strerror}).") from error
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    if len(tensors) < sum(len(header.tensors) for header in headers):
        raise WeightsError(f"{parts[0]}: two of its parts have a tensor of one name.")
    return Header(headers[0].metadata, tensors)


def read_base_models(path: Path) -> list[str]:
    """The repositories (owner/name) that a file says it was made of; reads its first keys only.

    Raises `WeightsError`.
    """
    with ErrorWrapper(WeightsError, f"{path}: cannot be read"), path.open("rb") as file:
        said = _Reader(path, file).general()
    urls = (str(said[key]) for key in sorted(said) if _BASE_MODEL.fullmatch(key))
    return ["/".join(url.rstrip("/").split("/")[-2:]) for url in urls]


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size

    def header(self) -> Header:
        """The whole header. Raises `WeightsError`."""
        tensors, entries = self._counts()
        metadata = {self._text(): self._value(self._number("I")) for _ in range(entries)}
        return Header(metadata, self._tensors(tensors, metadata))

    def general(self) -> dict[str, Any]:
        """The keys at its beginning that are about any model. Raises `WeightsError`."""
        _, entries = self._counts()
        metadata: dict[str, Any] = {}
        while len(metadata) < entries and (key := self._text()).startswith("general."):
            metadata[key] = self._value(self._number("I"))
        return metadata

    def _counts(self) -> tuple[int, int]:
        """The numbers of tensors and of metadata keys."""
        if self._file.read(4) != b"GGUF":
            raise WeightsError(f"{self._path}: not a GGUF file.")
        version = self._number("I")
        if version not in (2, 3):
            self._fail(f"version {version}; 2 and 3 are read")
        tensors = self._count("tensors", MAX_ENTRIES)
        return tensors, self._count("metadata keys", MAX_ENTRIES)

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, Tensor]:
        described = {}
        for _ in range(count):
            name, dimensions = self._text(), self._number("I")
            if not 0 < dimensions <= MAX_DIMENSIONS:
                self._fail(f"{name} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            described[name] = (shape, self._number("I"), self._number("Q"))
        if len(described) < count:
            self._fail("two tensors have one name")
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT:
            self._fail(f"general.alignment is {str(alignment)[:20]}")
        base = -(-self._file.tell() // alignment) * alignment
        return {
            name: self._tensor(name, shape, kind, base + offset)
            for name, (shape, kind, offset) in described.items()
        }

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
        with ErrorWrapper(WeightsError, f"{self._path}: {name} has an unknown type"):
            tensor = Tensor(GGMLQuantizationType(kind), shape, self._path, start)
        if math.prod(shape) == 0 or shape[-1] % GGML_QUANT_SIZES[tensor.type][0]:
            self._fail(f"{name} of type {tensor.type.name} has the shape {shape}")
        if start + tensor.size > self._size:
            raise WeightsError(
                f"{self._path}: truncated, {name} ends at byte {start + tensor.size:,} of "
                f"{self._size:,}. Download it again."
            )
        return tensor

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._number(self._code(kind))
        kind, count = self._number("I"), self._count("items", MAX_ITEMS)
        if kind != GGUFValueType.STRING:
            code = f"<{count}{self._code(kind)}"
            return list(struct.unpack(code, self._bytes(struct.calcsize(code))))
        if count * 8 > self._size:  # each text takes at least the eight bytes of its length
            self._fail(f"{count:,} texts")
        return [self._text() for _ in range(count)]

    def _code(self, kind: int) -> str:
        code = _SCALARS.get(kind, "_")
        return self._fail(f"a value of type {kind}") if code == "_" else code

    def _text(self) -> str:
        content = self._bytes(self._count("bytes of text", MAX_TEXT))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self._path}: a broken header (text not in UTF-8).") from error

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("Q"))
        return count if count <= most else self._fail(f"{count:,} {what}")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, count: int) -> bytes:
        content = self._file.read(count) if count <= self._size else b""
        if len(content) < count:
            raise WeightsError(
                f"{self._path}: truncated, its header is incomplete. Download it again."
            )
        return content

    def _fail(self, problem: str) -> NoReturn:
        raise WeightsError(f"{self._path}: a broken header ({problem}).")
