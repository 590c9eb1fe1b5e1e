"""Damaged model folders: each ends in one line that names the file, never in a traceback."""

import json
import os

import mlx.core as mx
import pytest
from tinymodels import save_drafter, save_target

from dflash_mlx.errors import (
    ConfigError,
    DFlashError,
    ModelNotFoundError,
    SettingsError,
    WeightsError,
)
from dflash_mlx.loading.load import load_drafter, load_target
from dflash_mlx.loading.target import damaged_weights


@pytest.fixture
def folder(tmp_path):
    """A target's folder to damage."""
    return save_target(tmp_path / "target")


@pytest.fixture
def drafter(tmp_path):
    """A drafter's folder to damage."""
    return save_drafter(tmp_path / "drafter")


def refusal(folder, error: type[DFlashError] = ConfigError, loader=load_target) -> str:
    """The one line of the error that loading raises."""
    with pytest.raises(error) as caught:
        loader(str(folder))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600
    return message


def rewrite(path, **fields) -> None:
    """Replace fields of a JSON file; those set to `...` are removed."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: v for name, v in content.items() if v is not ...}))


def change_weights(folder, change) -> None:
    """Store the weights that `change` leaves in a dictionary of tensors."""
    path = str(folder / "model.safetensors")
    weights = dict(mx.load(path))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(path, weights)


@pytest.mark.parametrize("name", ["line\nbreak", "\x1b[31m", "ñ 中文"])
def test_a_folder_of_any_name_loads(name, tmp_path):
    folder = save_target(tmp_path / name)
    assert load_target(str(folder)).num_layers == 3
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in refusal(folder)


@pytest.mark.parametrize("name", ["x" * 5000, "\0", "~nobody-at-all/x", ""])
def test_names_that_the_system_refuses(name):
    refusal(name, ModelNotFoundError)


@pytest.mark.parametrize("name", [None, 5])
def test_names_of_another_type(name):
    with pytest.raises(SettingsError, match="named by a string"):
        load_target(name)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "dangling", "folder", "endless"])
def test_what_is_no_file_is_refused_and_not_waited_for(file, kind, folder):
    path = folder / file
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"dangling": "nowhere", "endless": "/dev/zero"}[kind])
    said = refusal(folder, DFlashError)
    assert str(path) in said or f"no {file} in it" in said


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(name, folder):
    (folder / name).unlink()
    assert f"no {name}" in refusal(folder, DFlashError)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "unheard_of"},
        {"model_type": ...},
        {"hidden_size": ...},
        {"num_attention_heads": 0},
        {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        {"model_file": "evil.py"},
    ],
    ids=str,
)
def test_a_config_that_mlx_lm_refuses(fields, folder):
    rewrite(folder / "config.json", **fields)
    assert "mlx-lm cannot load it" in refusal(folder)


@pytest.mark.parametrize("layers", [2**31, 0, "many"])
def test_a_number_of_layers_that_no_model_has(layers, folder):
    rewrite(folder / "config.json", num_hidden_layers=layers)
    assert "config.json: num_hidden_layers must be" in refusal(folder)


def test_a_model_that_does_not_run_is_refused_when_it_is_loaded(tmp_path):
    """More experts for each token than there are: only a forward fails."""
    folder = save_target(tmp_path / "moe", "qwen3_moe")
    rewrite(folder / "config.json", num_experts_per_tok=100)
    assert "does not run" in refusal(folder)


def test_weights_that_make_nan_are_refused(folder):
    change_weights(
        folder, lambda weights: weights.update({"model.norm.weight": mx.full(64, mx.nan)})
    )
    message = refusal(folder, WeightsError)
    assert "NaN or infinite weights in model.norm.weight, 1 tensors in all" in message


@pytest.mark.parametrize("number", [mx.nan, mx.inf])
def test_one_damaged_number_is_found_where_a_short_text_does_not_meet_it(number, folder):
    """`dflash-mlx doctor --model` reads every weight; loading does not."""

    def change(weights):
        weights["model.embed_tokens.weight"][77, 5] = number

    change_weights(folder, change)
    said = damaged_weights(load_target(str(folder)).model)
    assert "weights in model.embed_tokens.weight, 1 tensors in all" in said


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.pop("model.norm.weight"),
        lambda weights: weights.update({"model.extra.weight": mx.ones((3,))}),
        lambda weights: weights.update({"model.norm.weight": mx.ones((65,))}),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weights_that_do_not_fit_the_config(change, folder):
    change_weights(folder, change)
    refusal(folder, (WeightsError, ConfigError))


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("tokenizer.json", {"model": {"type": "Nothing"}}),
        ("tokenizer.json", {"decoder": []}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"tool_parser_type": "nothing"}),
    ],
    ids=str,
)
def test_broken_tokenizers(file, fields, folder):
    rewrite(folder / file, **fields)
    assert "the tokenizer cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": 3}, {"head_dim": 32}, {"target_layer_ids": [1]}], ids=str
)
def test_a_drafter_whose_weights_do_not_fit_its_config(fields, drafter):
    rewrite(drafter / "config.json", **fields)
    assert "do not fit" in refusal(drafter, WeightsError, load_drafter)


def test_a_drafter_without_config_or_of_a_later_version(drafter):
    rewrite(drafter / "config.json", architectures=["DFlash3DraftModel"])
    assert "architectures" in refusal(drafter, ConfigError, load_drafter)
    (drafter / "config.json").unlink()
    assert "config.json" in refusal(drafter, ModelNotFoundError, load_drafter)
