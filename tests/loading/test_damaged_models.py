"""Damaged model folders: each ends in one line that names the file, never in a traceback."""

import json
import os

import mlx.core as mx
import pytest
from tinymodels import refusal, save_drafter, save_target

from dflash_mlx.errors import ConfigError, DFlashError, ModelNotFoundError, SettingsError
from dflash_mlx.errors import WeightsError as Weights
from dflash_mlx.loading import folder as folders
from dflash_mlx.loading.folder import Folder, read_tensors_of_file
from dflash_mlx.loading.load import load, load_drafter, load_target
from dflash_mlx.loading.target_loader import damaged_weights

WEIGHTS = "model.safetensors"


# These return functions that damage the model in a folder.


def fields(file="config.json", **changed):
    """Replace fields of a JSON file; those set to `...` are removed."""

    def damage(folder):
        content = json.loads((folder / file).read_text()) | changed
        content = {name: value for name, value in content.items() if value is not ...}
        (folder / file).write_text(json.dumps(content))

    return damage


def tensors(**changed):
    """Replace tensors; those set to `...` are removed. In their names, `__` stands for a dot."""

    def damage(folder):
        stored = dict(mx.load(str(folder / WEIGHTS)))
        mx.eval(stored)
        stored |= {name.replace("__", "."): value for name, value in changed.items()}
        kept = {name: value for name, value in stored.items() if value is not ...}
        mx.save_safetensors(str(folder / WEIGHTS), kept)

    return damage


def content(file, new):
    """Replace a file with `new` bytes, keep only a slice of it, or, with None, delete it."""

    def damage(folder):
        if isinstance(new, slice):
            (folder / file).write_bytes((folder / file).read_bytes()[new])
        elif new is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(new)

    return damage


def header(**changed):
    """Replace the weights with one tensor of 32 bytes, whose header has wrong fields."""
    tensor = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]} | changed
    text = json.dumps({"a": tensor}).encode()
    return content(WEIGHTS, len(text).to_bytes(8, "little") + text + bytes(32))


CANNOT = "config.json: mlx-lm cannot load it"
TRUNCATED = f"{WEIGHTS}: truncated, or not a safeten"
LAYERS = "config.json: num_hidden_layers must be"
TOKENIZER = "the tokenizer cannot be read"
INDEX = "model.safetensors.index.json"
UNFIT = "the weights do not fit the config"
# What is broken of a target, the error, and a part of its message.
DAMAGE = {
    "no config": (content("config.json", None), ModelNotFoundError, "no config.json"),
    "no tokenizer": (content("tokenizer.json", None), ModelNotFoundError, "no tokenizer.json"),
    "no weights": (content(WEIGHTS, None), Weights, f"no {WEIGHTS}"),
    "half a config": (content("config.json", b"{"), ConfigError, "config.json: not valid JSON"),
    "an unknown model": (fields(model_type="unheard_of"), ConfigError, CANNOT),
    "no model's name": (fields(model_type=...), ConfigError, CANNOT),
    "no hidden size": (fields(hidden_size=...), ConfigError, CANNOT),
    "no heads": (fields(num_attention_heads=0), ConfigError, CANNOT),
    "a rotation": (
        fields(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        ConfigError,
        CANNOT,
    ),
    "code": (fields(model_file="evil.py"), ConfigError, CANNOT),
    "2^31 layers": (fields(num_hidden_layers=2**31), ConfigError, LAYERS),
    "0 layers": (fields(num_hidden_layers=0), ConfigError, LAYERS),
    "many layers": (fields(num_hidden_layers="many"), ConfigError, LAYERS),
    "no file": (content(WEIGHTS, slice(0)), Weights, TRUNCATED),
    "a header's length": (content(WEIGHTS, slice(8)), Weights, TRUNCATED),
    "all but a byte": (content(WEIGHTS, slice(-1)), Weights, TRUNCATED),
    "all but 200 bytes": (content(WEIGHTS, slice(-200)), Weights, TRUNCATED),
    "a portal's page": (content(WEIGHTS, b"<!DOCTYPE html>" * 40), Weights, TRUNCATED),
    "a pointer": (content(WEIGHTS, b"version https://git-lfs.github.com"), Weights, TRUNCATED),
    "another dtype": (header(dtype="F99"), Weights, TRUNCATED),
    "a huge shape": (header(shape=[2**40, 2**40]), Weights, TRUNCATED),
    "a negative offset": (header(data_offsets=[0, -4]), Weights, TRUNCATED),
    "half an index": (content(INDEX, b"{"), Weights, INDEX),
    "an index of nothing": (content(INDEX, b'{"weight_map": 5}'), Weights, INDEX),
    "a tensor less": (tensors(model__norm__weight=...), ConfigError, "model.norm.weight"),
    "a tensor more": (tensors(model__extra__weight=mx.ones(3)), ConfigError, "model.extra.weight"),
    "another shape": (tensors(model__norm__weight=mx.ones(65)), ConfigError, "model.norm.weight"),
    "not a number": (
        tensors(model__norm__weight=mx.full(64, mx.nan)),
        Weights,
        "NaN or infinite weights in model.norm.weight, 1 tensors in all",
    ),
    "a tokenizer's model": (
        fields("tokenizer.json", model={"type": "Nothing"}),
        ConfigError,
        TOKENIZER,
    ),
    "its decoder": (fields("tokenizer.json", decoder=[]), ConfigError, TOKENIZER),
    "its class": (fields("tokenizer_config.json", tokenizer_class=5), ConfigError, TOKENIZER),
    "its parser": (fields("tokenizer_config.json", tool_parser_type="no"), ConfigError, TOKENIZER),
}
DRAFTERS = {
    "layers": (fields(num_hidden_layers=3), Weights, UNFIT),
    "heads": (fields(head_dim=32), Weights, UNFIT),
    "taps": (fields(target_layer_ids=[1]), Weights, UNFIT),
    "a later version": (fields(architectures=["DFlash3DraftModel"]), ConfigError, "architectures"),
    "no config": (content("config.json", None), ModelNotFoundError, "no config.json"),
}


@pytest.mark.parametrize(("damage", "error", "words"), DAMAGE.values(), ids=DAMAGE)
def test_the_error_about_a_damaged_target_names_the_file(damage, error, words, tmp_path):
    folder = save_target(tmp_path)
    damage(folder)
    assert words in refusal(error, load_target, folder)


@pytest.mark.parametrize(("damage", "error", "words"), DRAFTERS.values(), ids=DRAFTERS)
def test_the_error_about_a_damaged_drafter_names_the_fault(damage, error, words, tmp_path):
    folder = save_drafter(tmp_path)
    damage(folder)
    assert words in refusal(error, load_drafter, folder)


def test_a_model_that_does_not_run_is_refused_when_it_is_loaded(tmp_path):
    """More experts for each token than there are: only a forward fails."""
    folder = save_target(tmp_path / "moe", "qwen3_moe")
    fields(num_experts_per_tok=100)(folder)
    assert "does not run" in refusal(ConfigError, load_target, folder)


@pytest.mark.parametrize("name", ["line\nbreak", "\x1b[31m", "ñ 中文"])
def test_a_folder_of_any_name_loads(name, tmp_path):
    folder = save_target(tmp_path / name)
    assert load_target(str(folder)).num_layers == 3
    content("config.json", b"{")(folder)
    assert "not valid JSON" in refusal(ConfigError, load_target, folder)


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "~nobody-at-all/x", ""])
def test_names_that_cannot_be_paths_are_refused(name):
    refusal(ModelNotFoundError, load_target, name)
    if name:
        with pytest.raises(ModelNotFoundError, match="No adapter"):
            load_target("tiny", adapter=name)


@pytest.mark.parametrize("name", [None, 5])
def test_names_that_are_not_strings_are_refused(name):
    with pytest.raises(SettingsError, match="named by a string"):
        load_target(name)


@pytest.mark.parametrize("file", ["config.json", WEIGHTS, "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "dangling", "folder", "endless"])
def test_pipes_and_devices_are_refused_without_waiting(file, kind, tmp_path):
    folder = save_target(tmp_path)
    path = folder / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"dangling": "nowhere", "endless": "/dev/zero"}[kind])
    said = refusal(DFlashError, load_target, folder)
    assert str(path) in said or f"no {file} in it" in said


@pytest.mark.parametrize("number", [mx.nan, mx.inf])
def test_doctor_finds_a_damaged_weight_that_loading_does_not_read(number, tmp_path):
    """Loading decodes a short text only, but `dflash-mlx doctor --model` reads every weight."""
    folder = save_target(tmp_path)
    name = "model.embed_tokens.weight"
    weights = mx.load(str(folder / WEIGHTS))[name]
    weights[77, 5] = number
    tensors(**{name: weights})(folder)
    said = damaged_weights(load_target(str(folder)).model)
    assert f"weights in {name}, 1 tensors in all" in said


def test_loading_a_pair_reads_each_header_once(tmp_path, monkeypatch):
    files_read = []

    def recording_read(file):
        files_read.append(file)
        return read_tensors_of_file(file)

    monkeypatch.setattr(folders, "read_tensors_of_file", recording_read)
    target = save_target(tmp_path / "target")
    drafter = save_drafter(tmp_path / "drafter")
    assert Folder(target).files == [target / WEIGHTS]
    files_read.clear()
    load(target, drafter)
    assert sorted(files_read) == sorted([target / WEIGHTS, drafter / WEIGHTS])


def test_the_files_of_an_incomplete_download_are_an_error(tmp_path):
    """`Folder.files` decides whether a copy from the hub or a kept conversion can be used."""
    file = save_target(tmp_path) / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Weights, match=WEIGHTS):
        _ = Folder(tmp_path).files
