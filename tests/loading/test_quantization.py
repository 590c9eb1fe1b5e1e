"""Quantizing on load: every mode and width, and that drafted text stays plain text."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import plain_tokens, random_model, random_prompt, target_of
from oracle import Oracle
from tinymodels import save_drafter, save_target

from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.load import load, load_drafter, load_target
from dflash_mlx.loading.quantization import Quantization
from dflash_mlx.loop import generate

MODES = [("affine", 4, None), ("affine", 8, 32), ("affine", 4, 128)]
MODES += [("mxfp4", 4, None), ("mxfp8", 8, None), ("nvfp4", 4, None)]
KINDS = ["qwen3", "qwen3_moe", "qwen3_5", "deepseek_v3"]  # dense, experts, hybrid, MLA


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return str(save_target(folder / "target")), str(save_drafter(folder / "drafter"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", KINDS)
def test_drafted_text_is_the_quantized_models_plain_text(family, bits):
    """It is compared with mlx-lm's text, and so is ours without a drafter."""
    model = random_model(family)
    prompt = random_prompt(40, 4)
    Quantization(bits, 32).apply(model)
    assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    target = target_of(model, family)
    answer = plain_tokens(model, prompt, 40)
    assert generate(target, None, prompt, max_tokens=40).tokens == answer
    for p, block in ((0, 5), (0.5, 8), (0.85, 16), (1, 16)):
        oracle = Oracle(prompt, answer, 256, p=p)
        assert generate(target, oracle, prompt, max_tokens=40, block_size=block).tokens == answer


@pytest.mark.parametrize(("mode", "bits", "group_size"), MODES)
def test_all_matrices_get_the_mode_bits_and_group_size(mode, bits, group_size, pair):
    options = {"mode": mode, "group_size": group_size}
    target, drafter = load(*pair, target_bits=bits, draft_bits=bits, **options)
    for module in (target.model, drafter):
        kinds = {
            (part.mode, part.bits, part.group_size)
            for part in module.modules()
            if isinstance(part, nn.QuantizedLinear)
        }
        expected = group_size or {"affine": 64, "nvfp4": 16}.get(mode, 32)
        assert kinds == {(mode, bits, expected)}
    prompt = [5, 6, 7]
    plain = generate(target, None, prompt, max_tokens=24).tokens
    assert generate(target, drafter, prompt, max_tokens=24).tokens == plain


def test_bits_that_the_model_class_requires_for_a_layer_are_respected():
    """In mlx-lm, routers of experts always have 8 bits."""
    model = random_model("qwen3_moe")
    Quantization(4, 32).apply(model)
    layer = model.model.layers[0]
    assert (layer.mlp.gate.bits, layer.mlp.gate.group_size) == (8, 64)
    assert layer.self_attn.q_proj.bits == layer.mlp.switch_mlp.up_proj.bits == 4


@pytest.mark.parametrize(
    ("bits", "mode", "group_size", "words"),
    [
        (3, "affine", None, "4 or 8 bits, not 3"),
        (4, "int4", None, "affine, mxfp4, mxfp8, nvfp4, not 'int4'"),
        (4, "mxfp8", None, "mxfp8 quantizes to 8 bits, not 4"),
        (4, "nvfp4", 32, "groups of 16 weights, not 32"),
        (None, "affine", 32, "give the bits too"),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_settings_that_cannot_be_combined_are_refused(bits, mode, group_size, words, which, pair):
    loader = (load_target, load_drafter)[which]
    with pytest.raises(SettingsError, match=words) as caught:
        loader(pair[which], bits, mode=mode, group_size=group_size)
    assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match=words):
        load(*pair, target_bits=bits, mode=mode, group_size=group_size)


@pytest.mark.parametrize(("mode", "bits", "group_size"), MODES[:2] + MODES[3:])
def test_the_predicted_bytes_of_a_quantized_matrix_are_exact(mode, bits, group_size):
    quantization = Quantization.of(bits, mode, group_size)
    linear = nn.Linear(256, 512, bias=False)
    linear.set_dtype(mx.bfloat16)
    packed = nn.Sequential(linear)
    quantization.apply(packed)
    [layer] = packed.layers
    taken = sum(layer[name].nbytes for name in ("weight", "scales", "biases") if name in layer)
    assert quantization.quantized_bytes(256 * 512) == taken
