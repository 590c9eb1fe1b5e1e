"""Weight files: whole ones pass, everything a broken download leaves is named."""

import json
import re

import mlx.core as mx
import pytest
from mtp_heads import config_of
from tinymodels import save_drafter, save_target

from dflash_mlx.errors import WeightsError
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.load import load_drafter, load_target
from dflash_mlx.loading.mtp import head_tensors

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
        _ = Folder(folder).files
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_file_passes(folder):
    assert Folder(folder).files == [folder / NAME]


@pytest.mark.parametrize("kept", [0, 8, -1, -200])
def test_a_truncated_file(folder, kept):
    whole = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(whole[:kept])
    assert f"{folder / NAME}: truncated" in refused(folder)


HEADER = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html><html>" * 40,  # what a captive portal sends instead of a download
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n",
        *(
            with_header({"a": HEADER | changes}, bytes(32))
            for changes in ({"dtype": "F99"}, {"shape": [2**40, 2**40]}, {"data_offsets": [0, -4]})
        ),
    ],
)
@pytest.mark.parametrize("reader", ["target", "drafter", "head"])
def test_what_is_no_safetensors_file(tmp_path, content, reader):
    """One line that names the file, whoever reads it."""
    save = save_drafter if reader == "drafter" else save_target
    file = save(tmp_path / reader) / NAME
    file.write_bytes(content)
    loader = load_drafter if reader == "drafter" else load_target
    with pytest.raises(WeightsError, match=re.escape(str(file))) as caught:
        if reader == "head":
            head_tensors(Folder(file.parent), config_of("qwen3_5"))
        else:
            loader(str(file.parent))
    assert str(caught.value).isprintable()


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
    assert Folder(folder).files == [folder / name for name in names]


def test_a_missing_shard_is_named(shards):
    folder, names = shards
    (folder / names[1]).unlink()
    assert f"{names[1]} is missing" in refused(folder)


@pytest.mark.parametrize("content", ["{", '{"weight_map": 5}'])
def test_a_broken_index_is_named(shards, content):
    folder, _ = shards
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refused(folder)
