"""The header of a GGUF file: its metadata and the places of its tensors, every number checked.

The format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. MLX reads the
tensors; its reader trusts the file, so this module has to find what is damaged.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ...errors import WeightsError

MAGIC = b"GGUF"
MAX_ENTRIES = 1 << 16  # metadata keys, or tensors; real files have a few hundred
MAX_ITEMS = 1 << 24  # of an array; the largest vocabularies have 300,000 tokens
MAX_TEXT = 1 << 26  # bytes of a string; a chat template has some thousands
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
ALIGNMENT = 32  # bytes, of the tensors' data; the metadata may give another

# Tensor types that MLX reads: name -> (weights per block, bytes per block).
READABLE = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}
# ggml's numbers of types.
TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS"},
    **{17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # codes of `struct`


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor in the file.

    Attributes:
        type: a name of `TYPES`.
        shape: in MLX's order, the slowest dimension first.
        start: offset of its first byte in the file.
        size: its bytes; 0 for types that MLX does not read.
    """

    type: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """A GGUF file's metadata by key and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file, and compare the file's size with its tensors.

    Raises `WeightsError`: not a GGUF file, truncated, or a number in it that cannot be true.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}).") from error


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size

    def header(self) -> Header:
        """The whole header. Raises `WeightsError`."""
        if self._file.read(4) != MAGIC:
            raise WeightsError(f"{self._path}: not a GGUF file.")
        version = self._number("I")
        if version not in (2, 3):
            raise WeightsError(f"{self._path}: GGUF of version {version}; 2 and 3 are read.")
        tensors = self._count("tensors", MAX_ENTRIES)
        entries = self._count("metadata keys", MAX_ENTRIES)
        metadata = {}
        for _ in range(entries):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        return Header(metadata, self._tensors(tensors, metadata))

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, Tensor]:
        described = {}
        for _ in range(count):
            name, dimensions = self._text(), self._number("I")
            if not 0 < dimensions <= MAX_DIMENSIONS:
                self._fail(f"{name} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            kind = TYPES.get(number := self._number("I"), f"of type {number}")
            described[name] = (kind, shape, self._number("Q"))
        if len(described) < count:
            self._fail("two tensors have one name")
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            self._fail(f"general.alignment is {str(alignment)[:20]}")
        base = -(-self._file.tell() // alignment) * alignment
        return {
            name: self._tensor(name, kind, shape, base + offset)
            for name, (kind, shape, offset) in described.items()
        }

    def _tensor(self, name: str, kind: str, shape: tuple[int, ...], start: int) -> Tensor:
        block, size = READABLE.get(kind, (1, 0))
        weights = math.prod(shape)
        if weights == 0 or shape[-1] % block:
            self._fail(f"{name} of type {kind} has the shape {shape}")
        end = start + weights // block * size
        if end > self._size:
            raise WeightsError(
                f"{self._path}: truncated, {name} ends at byte {end:,} of {self._size:,}. "
                "Download it again."
            )
        return Tensor(kind, shape, start, end - start)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._count("items", MAX_ITEMS))
        if kind not in _SCALARS:
            self._fail(f"a value of type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            if count * 8 > self._size:  # each text takes at least the eight bytes of its length
                self._fail(f"{count:,} texts")
            return [self._text() for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"an array of type {kind}")
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self._bytes(struct.calcsize(code))))

    def _text(self) -> str:
        content = self._bytes(self._count("bytes of text", MAX_TEXT))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self._path}: a broken header (text not in UTF-8).") from error

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("Q"))
        if count > most:
            self._fail(f"{count:,} {what}")
        return count

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
