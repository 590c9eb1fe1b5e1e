"""Weight files: whole ones pass, everything a broken download leaves is named."""

import json
import math
import re
from functools import partial

import mlx.core as mx
import pytest
from mtp_heads import config_of, head_weights
from tinymodels import save_drafter, save_target

from dflash_mlx.errors import WeightsError
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.load import load_drafter, load_target
from dflash_mlx.loading.mtp import head_tensors
from dflash_mlx.loading.reading import load_file

NAME = "model.safetensors"
SAVED = {"target": (save_target, load_target), "drafter": (save_drafter, load_drafter)}


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


@pytest.mark.parametrize(
    "content",
    [
        b"\x08" + bytes(7) + b"not json",
        with_header([1, 2]),
        b"<!DOCTYPE html><html>" * 40,  # what a captive portal sends instead of a download
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n",
    ],
)
def test_what_is_no_safetensors_file(folder, content):
    (folder / NAME).write_bytes(content)
    assert str(folder / NAME) in refused(folder)


VALUES = (None, True, -4, 0, 3, 2**70, 1.5, math.inf, math.nan, "", "F32", "\ud800", [], ["x"])
VALUES += ([2**40, 2**40], [0, math.inf], ["0", 4], [0, -4], [8, 4], [1], [[0], 4], {}, {"a": 1})


@pytest.mark.parametrize("reader", ["target", "drafter", "head"])
def test_headers_whose_fields_have_any_json_type(tmp_path, reader):
    """Of every field of an entry, and of entries themselves: one named error, or the weights."""
    if reader == "head":
        folder, weights = tmp_path, head_weights("qwen3_5")
        (folder / "config.json").write_text("{}")
        mx.save_safetensors(str(folder / NAME), {k: mx.array(v) for k, v in weights.items()})

        def load():
            found = head_tensors(Folder(folder), config_of("qwen3_5")).values()
            return [load_file(file) for file in {tensor.file for _, tensor in found}]
    else:
        save, loader = SAVED[reader]
        folder = save(tmp_path / reader)
        load = partial(loader, str(folder))
    file = folder / NAME
    whole = file.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    right = json.loads(whole[8:size])
    name = next(name for name in right if name != "__metadata__")
    for field in ("dtype", "shape", "data_offsets", None):
        for value in VALUES:
            entry = value if field is None else right[name] | {field: value}
            file.write_bytes(with_header(right | {name: entry}, whole[size:]))
            if entry == right[name]:
                assert load()
                continue
            with pytest.raises(WeightsError, match=re.escape(str(file))) as caught:
                load()
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
