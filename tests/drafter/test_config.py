"""A drafter's config.json: its layouts, and what the errors of a wrong one say."""

import json
import math

import pytest

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import ConfigError, IncompatibleDrafterError

MINIMAL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 211,
    "block_size": 16,
    "mask_token_id": 210,
    "num_target_layers": 12,
    "target_layer_ids": [1, 5, 9],
}
SLIDING = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


def config(**fields) -> DraftConfig:
    """Resolve the minimal config with some fields replaced; a field set to `...` is left out."""
    merged = MINIMAL | fields
    return DraftConfig.from_dict(
        {name: value for name, value in merged.items() if value is not ...}
    )


# Only layouts that no config in test_published_configs.py has: fields, and what they resolve to.
LAYOUTS = {
    "defaults": (
        {},
        {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "windows": (None, None, None),
            "causal": (False, False, False),
            "target_layer_ids": (1, 5, 9),
        },
    ),
    "a nested null does not replace the value at the root": (
        {"dflash_config": {"block_size": None}, "target_layer_ids": [3]},
        {"block_size": 16, "target_layer_ids": (3,)},
    ),
    "is_causal false applies to every layer": (
        SLIDING | {"is_causal": False},
        {"windows": (8, 8, None), "causal": (False,) * 3},
    ),
    "rope_parameters take precedence": (
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e7}},
        {"rope_theta": 1e7},
    ),
    "num_target_layers may be missing": (
        {"num_target_layers": ..., "target_layer_ids": [1, 9]},
        {"num_target_layers": None, "target_layer_ids": (1, 9)},
    ),
}


@pytest.mark.parametrize(("fields", "expected"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_resolves_to_the_expected_fields(fields, expected):
    resolved = config(**fields)
    assert {name: getattr(resolved, name) for name in expected} == expected


def nested(**fields):
    return {"dflash_config": fields}


def yarn(**more):
    return {"rope_scaling": YARN | more}


DFLASH2 = {"architectures": ["DFlash2DraftModel"]}
DFLASH2_SIZES = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
WRONG = {  # the start of the error's message: the fields that cause it
    "num_hidden_layers is missing": {"num_hidden_layers": ...},
    "hidden_size must": {"hidden_size": "64"},
    "hidden_size must be a whole number": {"hidden_size": 2**40},
    "rms_norm_eps must": {"rms_norm_eps": math.inf},
    "num_key_value_heads must divide": {"num_key_value_heads": 3},
    "head_dim must be even": {"head_dim": 15},
    "block_size must": {"block_size": 1},
    "dflash_config.block_size must": nested(block_size=8.0),
    "mask_token_id must": {"mask_token_id": 211},  # outside the vocabulary
    "target_layer_ids is missing": {"target_layer_ids": ...},
    "dflash_config.target_layer_ids must": nested(target_layer_ids=[]),
    "layer_types must": {"layer_types": ["full_attention"] * 2 + ["linear_attention"]},
    "sliding_window is missing": {"layer_types": ["sliding_attention"] * 3},
    "max_window_layers is missing": {"use_sliding_window": True, "sliding_window": 64},
    "is_causal must": {"is_causal": "no"},
    "is_causal contradicts causal": {"is_causal": True, "causal": False},
    "rope_parameters.rope_theta must": {"rope_parameters": {"rope_theta": "1e6"}},
    "rope_scaling.rope_type must": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
    "rope_scaling.factor is missing": {"rope_scaling": {"type": "yarn"}},
    "rope_parameters.sliding_attention is not": {
        "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}
    },
    "rope_parameters.partial_rotary_factor must": {
        "rope_parameters": {"partial_rotary_factor": 0.25}
    },
    "hidden_act must": {"hidden_act": "gelu"},
    "draft_vocab_size must": {"draft_vocab_size": 32000},
    "architectures 'OtherModel' is not": {"architectures": ["OtherModel"]},
    "'Eagle3DraftModel' is an EAGLE-3 head": {"architectures": ["Eagle3DraftModel"]},
    "dflash_config.projector_type must": nested(projector_type="mlp"),
    "dflash_config.selector_rank must be 0": nested(selector_rank=16),
    "rope_scaling.low_freq_factor is not understood": yarn(low_freq_factor=1),
    "conv_kernel_size is missing": DFLASH2,
    "markov_rank must": DFLASH2 | DFLASH2_SIZES | {"markov_rank": 4},
    "dflash_config.conv_group_size must divide 64": DFLASH2
    | nested(**DFLASH2_SIZES | {"conv_group_size": 48}),
}


@pytest.mark.parametrize(("words", "fields"), WRONG.items())
def test_errors_name_the_wrong_field(words, fields):
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    assert str(caught.value).startswith(f"drafter config: {words}")


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": {"bits": 4, "group_size": 128, "quant_method": "gptq"}},
        {"quantization": {"mode": "mxfp4"}},
    ],
)
def test_an_unsupported_quantization_is_reported_as_unreadable(fields):
    [field] = fields
    assert field in config(**fields).unreadable


def test_the_error_of_a_file_names_its_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MINIMAL | {"block_size": 0}))
    with pytest.raises(ConfigError, match=f"^{path}: block_size must be a whole number"):
        DraftConfig.from_file(path)


def test_sources_tell_the_key_that_each_field_was_read_from():
    sources = config(**nested(block_size=8), rope_parameters={"rope_theta": 1e7}).sources
    assert sources["block_size"] == "dflash_config.block_size"
    assert sources["rope_theta"] == "rope_parameters.rope_theta"
    assert sources["mask_token_id"] == "mask_token_id" and sources["head_dim"] == "default"


# The size that differs, and sizes of a target (hidden, vocabulary, layers) in which only it does.
WRONG_SIZES = {
    "hidden_size": (65, 211, 12),
    "vocab_size": (64, 212, 12),
    "num_target_layers": (64, 211, 14),
}


@pytest.mark.parametrize(("field", "sizes"), WRONG_SIZES.items())
def test_a_target_of_another_size_is_refused(field, sizes):
    config().check_fits(64, 211, 12)
    with pytest.raises(IncompatibleDrafterError, match=f"another target: its {field} is"):
        config().check_fits(*sizes)


def test_without_num_target_layers_a_target_needs_the_layers_that_are_read():
    without_depth = config(num_target_layers=..., target_layer_ids=[1, 9])
    without_depth.check_fits(64, 211, 10)
    with pytest.raises(IncompatibleDrafterError, match="reads layer 9 of 9"):
        without_depth.check_fits(64, 211, 9)
