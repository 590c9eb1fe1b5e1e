"""Damaged GGUF headers, such as truncated ones or with huge counts, give one line quickly."""

import os
import struct
from pathlib import Path
from typing import Any

import pytest
from ggufs import gguf_of, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_mlx.errors import DFlashError, WeightsError
from dflash_mlx.loading.gguf.conversion import Conversion
from dflash_mlx.loading.gguf.gguf_tokenizer import build
from dflash_mlx.loading.gguf.header import read_header

HUGE = 2**62


def text(value: str) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(tensors: int = 0, entries: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body


def tensor(
    name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGML" + bytes(100), "not a GGUF file"),
        (b"GGUF", "truncated"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "version"),  # big-endian
        (header(tensors=HUGE), "count"),
        (header(entries=HUGE), "count"),
        (header(entries=1, body=struct.pack("<Q", HUGE)), "count"),
        (header(entries=1, body=text("k") + struct.pack("<I", 99)), "99"),
        (header(entries=1, body=text("k") + struct.pack("<IIQ", 9, 8, HUGE)), "count"),
        (header(entries=1, body=text("k") + struct.pack("<IIQ", 9, 4, HUGE)), "count"),
        (header(entries=1, body=struct.pack("<Q", 2) + b"\xff\xfe"), "utf-8"),
        (header(1, body=tensor(shape=())), "broken header"),
        (header(1, body=tensor(shape=(0,))), "shape"),
        (header(1, body=tensor(shape=(2**40, 2**40))), "truncated"),
        (header(1, body=tensor(offset=HUGE)), "truncated"),
        (header(2, body=tensor() + tensor() + bytes(400)), "two tensors"),
        (
            header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
            "broken header",
        ),
    ],
)
def test_an_impossible_header_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=said) as caught:
        read_header([path])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        header(tensors=2**30),
        header(entries=2**30),
        header(entries=1, body=struct.pack("<Q", 2**30)),
        header(entries=1, body=text("k") + struct.pack("<IIQ", 9, 0, 2**30)),
        header(entries=1, body=text("k") + struct.pack("<IIQ", 9, 8, 2**28)),
        header(1, body=text("a") + struct.pack("<I", 2**28)),
    ],
)
def test_huge_counts_are_refused_even_in_a_file_that_is_large_enough(
    tmp_path: Path, content: bytes
) -> None:
    """The file is sparse: its zeros take no room on the disk, but would fill the memory."""
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    os.truncate(path, 2**32)
    with pytest.raises(WeightsError, match=r"broken header \(a count of"):
        read_header([path])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    metadata, tensors, _ = gguf_of("llama")
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write(path, metadata=metadata, tensors=tensors, kinds=dict.fromkeys(tensors, "Q8_0"))
    assert read_metadata(path)
    return path.read_bytes()


def read_metadata(path: Path) -> Any:
    """Read all that is read before the tensors: the header, the config and the tokenizer."""
    conversion = Conversion([path], unpacked=True)
    return build(path, conversion.header.metadata)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(part=st.floats(0, 0.999))
def test_a_file_that_is_cut_anywhere_is_truncated(
    tmp_path: Path, whole: bytes, part: float
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(WeightsError, match="truncated|not a GGUF"):
        read_header([path])


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(4, 12_000), byte=st.integers(0, 255))
def test_a_wrong_byte_is_harmless_or_an_error_of_ours(
    tmp_path: Path, whole: bytes, position: int, byte: int
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(whole[:position] + bytes([byte]) + whole[position + 1 :])
    try:
        read_metadata(path)
    except DFlashError as error:
        assert "\n" not in str(error)
