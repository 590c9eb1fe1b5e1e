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


def fields(file="config.json", **changed):
    """Damage: replace fields of a JSON file; those set to `...` are removed."""

    def damage(folder):
        content = json.loads((folder / file).read_text()) | changed
        content = {name: value for name, value in content.items() if value is not ...}
        (folder / file).write_text(json.dumps(content))

    return damage


def tensors(**changed):
    """Damage: replace tensors; those set to `...` are removed."""

    def damage(folder):
        stored = dict(mx.load(str(folder / WEIGHTS)))
        mx.eval(stored)
        stored |= {name.replace("__", "."): value for name, value in changed.items()}
        kept = {name: value for name, value in stored.items() if value is not ...}
        mx.save_safetensors(str(folder / WEIGHTS), kept)

    return damage


def content(file, new):
    """A function that damages a file: `new` bytes replace it, a slice keeps that part of it.

    None deletes it.
    """

    def damage(folder):
        if isinstance(new, slice):
            (folder / file).write_bytes((folder / file).read_bytes()[new])
        elif new is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(new)

    return damage


def header(**changed):
    """Damage: a safetensors file of one tensor whose header says something else."""
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
def test_a_damaged_target(damage, error, words, tmp_path):
    folder = save_target(tmp_path)
    damage(folder)
    assert words in refusal(error, load_target, folder)


@pytest.mark.parametrize(("damage", "error", "words"), DRAFTERS.values(), ids=DRAFTERS)
def test_a_damaged_drafter(damage, error, words, tmp_path):
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
def test_names_that_the_system_refuses(name):
    refusal(ModelNotFoundError, load_target, name)
    if name:
        with pytest.raises(ModelNotFoundError, match="No adapter"):
            load_target("tiny", adapter=name)


@pytest.mark.parametrize("name", [None, 5])
def test_names_of_another_type(name):
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
def test_one_damaged_number_is_found_where_a_short_text_does_not_meet_it(number, tmp_path):
    """`dflash-mlx doctor --model` reads every weight; loading does not."""
    folder = save_target(tmp_path)
    name = "model.embed_tokens.weight"
    weights = mx.load(str(folder / WEIGHTS))[name]
    weights[77, 5] = number
    tensors(**{name: weights})(folder)
    said = damaged_weights(load_target(str(folder)).model)
    assert f"weights in {name}, 1 tensors in all" in said


def test_a_pair_is_loaded_with_one_look_at_each_header(tmp_path, monkeypatch):
    seen = []

    def read_once(file):
        seen.append(file)
        return read_tensors_of_file(file)

    monkeypatch.setattr(folders, "read_tensors_of_file", read_once)
    pair = save_target(tmp_path / "target"), save_drafter(tmp_path / "drafter")
    assert Folder(pair[0]).files == [pair[0] / WEIGHTS]
    seen.clear()
    load(*pair)
    assert sorted(seen) == sorted(folder / WEIGHTS for folder in pair)


def test_a_download_that_broke_off_is_not_complete(tmp_path):
    """Who asks for the files of a folder, as the hub's copies and kept conversions do, is told."""
    file = save_target(tmp_path) / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Weights, match=WEIGHTS):
        _ = Folder(tmp_path).files
