"""Weight files: whole ones pass, everything a broken download leaves is named."""

import json

import mlx.core as mx
import pytest
from tinymodels import save_drafter, save_target

from dflash_mlx.errors import WeightsError
from dflash_mlx.loading import folder as folders
from dflash_mlx.loading.folder import Folder, read_header
from dflash_mlx.loading.load import load

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
def test_what_is_no_safetensors_file(folder, content):
    (folder / NAME).write_bytes(content)
    assert str(folder / NAME) in refused(folder)


def test_no_weights(tmp_path):
    assert "no model.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"weight_map": 5}'])
def test_a_broken_index_is_named(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refused(folder)


def test_a_pair_is_loaded_with_one_look_at_each_header(tmp_path, monkeypatch):
    seen = []

    def read_once(file):
        seen.append(file)
        return read_header(file)

    monkeypatch.setattr(folders, "read_header", read_once)
    pair = save_target(tmp_path / "target"), save_drafter(tmp_path / "drafter")
    load(*pair)
    assert sorted(seen) == sorted(folder / NAME for folder in pair)
