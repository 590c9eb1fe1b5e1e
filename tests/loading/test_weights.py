"""Weight files: whole ones pass, everything a broken download leaves is named."""

import json

import mlx.core as mx
import pytest

from dflash_mlx.errors import WeightsError
from dflash_mlx.loading.checks import check_safetensors

NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    mx.save_safetensors(str(tmp_path / NAME), {"a": mx.ones((8, 8)), "b": mx.zeros((3,))})
    return tmp_path


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refused(folder) -> str:
    with pytest.raises(WeightsError) as caught:
        check_safetensors(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_file_passes(folder):
    assert check_safetensors(folder) == [folder / NAME]


@pytest.mark.parametrize("kept", [0, 8, -1, -200])
def test_a_truncated_file(folder, kept):
    whole = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(whole[:kept])
    assert f"{folder / NAME}: truncated" in refused(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"\x08" + bytes(7) + b"not json",
        with_header([1, 2]),
        with_header({"a": {"dtype": "F32"}}),
        with_header({"a": 5}),
        b"<!DOCTYPE html><html>" * 40,  # what a captive portal sends instead of a download
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n",
    ],
)
def test_what_is_no_safetensors_file(folder, content):
    (folder / NAME).write_bytes(content)
    assert str(folder / NAME) in refused(folder)


def test_no_weights(tmp_path):
    assert "no model.safetensors" in refused(tmp_path)


@pytest.fixture
def shards(tmp_path):
    """Two shards and their index."""
    names = [f"model-{i}-of-2.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        mx.save_safetensors(str(tmp_path / name), {f"w{i}": mx.ones((4,))})
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path, names


def test_whole_shards_pass(shards):
    folder, names = shards
    assert check_safetensors(folder) == [folder / name for name in names]


def test_a_missing_shard_is_named(shards):
    folder, names = shards
    (folder / names[1]).unlink()
    assert f"{names[1]} is missing" in refused(folder)


@pytest.mark.parametrize("content", ["{", '{"weight_map": 5}'])
def test_a_broken_index_is_named(shards, content):
    folder, _ = shards
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refused(folder)
