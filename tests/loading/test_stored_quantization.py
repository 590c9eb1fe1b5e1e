"""Quantization as other programs declare it: in config.json, or in a file next to it."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model
from tinymodels import refusal, save_target, save_weights

from dflash_mlx.errors import ConfigError
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.load import load_target


def quantize_to_nvfp4(folder: Path) -> None:
    """Replace the folder's weights by NVFP4 ones, with mlx-lm's names."""
    model, _ = load_model(folder)
    nn.quantize(model, 16, 4, mode="nvfp4")
    save_weights(folder, model)


@pytest.mark.parametrize("form", ["ModelOpt's", "with quant_method", "flat"])
def test_a_quantization_in_modelopts_own_file_is_read(tmp_path: Path, form: str) -> None:
    folder = save_target(tmp_path, "llama", hidden_size=128, intermediate_size=128)
    quantize_to_nvfp4(folder)
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    said: dict[str, Any] = {"producer": {"name": "modelopt"}, "quantization": settings}
    if form != "ModelOpt's":
        said = {"quant_method": "modelopt"} | (said if form == "with quant_method" else settings)
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    model = load_target(str(folder)).model
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", **settings}
    (folder / "hf_quant_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    wanted, _ = load_model(folder)
    tokens = mx.array([[1, 2, 3]])
    assert mx.allclose(model(tokens), wanted(tokens), atol=1e-3)
    assert isinstance(wanted.model.layers[0].mlp.up_proj, nn.QuantizedLinear)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, "quant_algo is 'FP8'; only NVFP4 can be loaded"),
        ({"producer": {"name": "modelopt"}}, "there is no quantization.quant_algo"),
        ({"quantization": {"quant_algo": None}}, None),
    ],
)
def test_the_error_about_a_modelopt_quantization_that_cannot_be_read_says_why(
    tmp_path: Path, said: dict[str, Any], message: str | None
) -> None:
    folder = save_target(tmp_path, "llama")
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    if message is None:
        assert load_target(str(folder))
        return
    error = refusal(ConfigError, load_target, folder)
    assert "hf_quant_config.json" in error and message in error


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
@pytest.mark.parametrize("nested", [False, True])
def test_plain_weights_are_read_although_the_config_names_a_quantization(
    tmp_path: Path, method: str, nested: bool
) -> None:
    """A model that was dequantized or merged may still have its old config. A warning says so."""
    folder = save_target(tmp_path, "llama")
    tokens = mx.array([[1, 2, 3]])
    wanted = load_target(str(folder)).model(tokens)
    config = json.loads((folder / "config.json").read_text())
    said = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    config |= {"text_config": {"model_type": "llama", **said}} if nested else said
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=f"quantization \\('{method}'\\), but the weights are"):
        target = load_target(str(folder), bits=8 if method == "awq" else None)
    if method == "awq":
        assert isinstance(target.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    else:
        assert mx.array_equal(target.model(tokens), wanted)


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [0.0, {"__float__": "Infinity"}], "b": {"c": 1}}')
    assert Folder(tmp_path).config == {"a": [0.0, float("inf")], "b": {"c": 1}}
