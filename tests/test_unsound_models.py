"""Folders made to hang, to fill the memory or to say something else: refused, and why is said."""

import json
import os

import mlx.core as mx
import pytest
from families import plain_tokens
from tinymodels import save_drafter, save_target

from dflash_mlx.errors import (
    ConfigError,
    DFlashError,
    ModelNotFoundError,
    SettingsError,
    WeightsError,
)
from dflash_mlx.loading.load import load_drafter, load_target
from dflash_mlx.loop import generate

PROMPT = [5, 9, 2, 40]


@pytest.fixture
def folder(tmp_path):
    return save_target(tmp_path / "target")


def refusal(folder, error: type[DFlashError] = ConfigError, loader=load_target) -> str:
    """The one line that a folder is refused with."""
    with pytest.raises(error) as caught:
        loader(str(folder))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600
    return message


def rewrite(path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def respell(folder, change) -> None:
    """Store weights that are `change`d: name, tensor -> tensor."""
    path = str(folder / "model.safetensors")
    weights = {name: change(name, value) for name, value in mx.load(path).items()}
    mx.eval(weights)
    mx.save_safetensors(path, weights)


@pytest.mark.parametrize("name", ["v [a]", "line\nbreak", "star*", "q?", "\x1b[31m", "ñ 中文"])
def test_a_folder_of_any_name_loads(name, tmp_path):
    folder = save_target(tmp_path / name)
    target = load_target(str(folder))
    expected = plain_tokens(target.model, PROMPT, 5)
    assert generate(target, None, PROMPT, max_tokens=5).tokens == expected
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in refusal(folder)


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "~nobody-at-all/x", "a/" + "b" * 300, ""])
def test_names_that_the_system_refuses(name):
    refusal(name, ModelNotFoundError)


@pytest.mark.parametrize("name", [None, 5, b"tiny"])
def test_what_is_no_name(name):
    with pytest.raises(SettingsError, match="named by text"):
        load_target(name)


@pytest.mark.parametrize(
    "file",
    ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
    + ["chat_template.jinja", "model.safetensors.index.json"],
)
@pytest.mark.parametrize("kind", ["pipe", "dangling", "loop", "folder", "endless"])
def test_what_is_no_file_is_refused_and_not_waited_for(file, kind, folder):
    path = folder / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"dangling": "nowhere", "loop": file, "endless": "/dev/zero"}[kind])
    said = refusal(folder, DFlashError)
    assert str(path) in said or file == "tokenizer.json" or f"no {file} in it" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2**31),
        ("num_hidden_layers", "many"),
        ("num_attention_heads", 0),
        ("hidden_size", 2**40),
        ("vocab_size", 10**400),
        ("intermediate_size", -128),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("rms_norm_eps", float("nan")),
        ("text_config", 5),
        ("max_position_embeddings", 0),
        ("eos_token_id", "end"),
    ],
)
def test_numbers_that_no_such_model_has(field, value, folder):
    rewrite(folder / "config.json", **{field: value})
    assert f"config.json: {field} " in refusal(folder)


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("tokenizer.json", {"model": {"type": "Nothing"}}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": None, "merges": []}}),
        ("tokenizer.json", {"decoder": []}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"tool_parser_type": "nothing"}),
        ("tokenizer_config.json", {"chat_template_type": "nothing"}),
    ],
    ids=str,
)
def test_tokenizers_that_are_none(file, fields, folder):
    rewrite(folder / file, **fields)
    assert "the tokenizer cannot be read" in refusal(folder)


@pytest.mark.parametrize("dtype", [mx.int32, mx.int8, mx.uint32, mx.bool_, mx.complex64], ids=str)
@pytest.mark.parametrize("loader", [load_target, load_drafter])
def test_weights_that_are_no_fractions(dtype, loader, tmp_path):
    save = save_target if loader is load_target else save_drafter
    folder = save(tmp_path)
    name = "layers.1.mlp.up_proj.weight"
    respell(folder, lambda path, value: value.astype(dtype) if path.endswith(name) else value)
    kind = str(dtype).removeprefix("mlx.core.")
    assert f"{name} is stored as {kind}" in refusal(folder, WeightsError, loader)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("loader", [load_target, load_drafter])
def test_weights_that_are_no_numbers(number, loader, tmp_path):
    """One of them suffices, also where no token of a short text would meet it."""
    save = save_target if loader is load_target else save_drafter
    folder = save(tmp_path)

    def change(path, value):
        if path.endswith("layers.1.mlp.up_proj.weight"):
            value[3, 5] = number
        return value

    respell(folder, change)
    assert "up_proj.weight has weights that are NaN" in refusal(folder, WeightsError, loader)


def test_a_model_that_does_not_run_is_refused_when_it_is_loaded(folder):
    """More experts for each token than there are: only a forward stumbles over it."""
    folder = save_target(folder.parent / "moe", "qwen3_moe")
    rewrite(folder / "config.json", num_experts_per_tok=100)
    assert "does not run" in refusal(folder)


@pytest.mark.parametrize(
    "table",
    [None, [], 5, {"model.norm.weight": 5}, {"model.norm.weight": "x" * 5000}, {"a": "\0"}],
    ids=lambda table: repr(table)[:30],
)
def test_indexes_with_wrong_types(table, folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    refusal(folder, WeightsError)


@pytest.mark.parametrize(
    "entry",
    [
        5,
        {},
        {"dtype": 5, "shape": [64], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": 64, "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [64.0], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [64], "data_offsets": ["0", "256"]},
        {"dtype": "F32", "shape": [64], "data_offsets": [256, 0]},
        {"dtype": "F32", "shape": [64], "data_offsets": [0, 10**30]},
        {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [65], "data_offsets": [0, 256]},
    ],
    ids=str,
)
def test_headers_with_wrong_types(entry, folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]) | {"model.norm.weight": entry}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    assert str(path) in refusal(folder, WeightsError)
