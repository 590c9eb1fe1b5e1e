"""Every published layout of a drafter's config.json, and every way it can be wrong."""

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
    """Resolve the minimal config with some fields replaced, and those set to `...` left out."""
    merged = MINIMAL | fields
    return DraftConfig.from_dict({k: v for k, v in merged.items() if v is not ...})


# What published configs (test_published_configs.py) show is not said again.
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
    "nested null leaves the root's": (
        {"dflash_config": {"block_size": None}, "target_layer_ids": [3]},
        {"block_size": 16, "target_layer_ids": (3,)},
    ),
    "is_causal false rules every layer": (
        SLIDING | {"is_causal": False},
        {"windows": (8, 8, None), "causal": (False,) * 3},
    ),
    "rope_parameters win": (
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e7}},
        {"rope_theta": 1e7},
    ),
    "the depth need not be told": (
        {"num_target_layers": ..., "target_layer_ids": [1, 9]},
        {"num_target_layers": None, "target_layer_ids": (1, 9)},
    ),
}


@pytest.mark.parametrize(("fields", "expected"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(fields, expected):
    resolved = config(**fields)
    assert {name: getattr(resolved, name) for name in expected} == expected


def nested(**fields):
    return {"dflash_config": fields}


def yarn(**more):
    return {"rope_scaling": YARN | more}


TWO = {"architectures": ["DFlash2DraftModel"]}
SIZES_OF_TWO = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
WRONG = {
    # how the message starts: what is wrong
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
    "conv_kernel_size is missing": TWO,
    "markov_rank must": TWO | SIZES_OF_TWO | {"markov_rank": 4},
    "dflash_config.conv_group_size must divide 64": TWO
    | nested(**SIZES_OF_TWO | {"conv_group_size": 48}),
}


@pytest.mark.parametrize(("words", "fields"), WRONG.items())
def test_errors_name_the_field(words, fields):
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
def test_other_quantizations_are_unreadable(fields):
    assert next(iter(fields)) in config(**fields).unreadable


def test_the_message_says_where(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MINIMAL | {"block_size": 0}))
    with pytest.raises(ConfigError, match=f"^{path}: block_size must be a whole number"):
        DraftConfig.from_file(path)


def test_fields_say_where_they_were_read():
    sources = config(**nested(block_size=8), rope_parameters={"rope_theta": 1e7}).sources
    assert sources["block_size"] == "dflash_config.block_size"
    assert sources["rope_theta"] == "rope_parameters.rope_theta"
    assert sources["mask_token_id"] == "mask_token_id" and sources["head_dim"] == "default"


SHAPES = {
    "hidden_size": (65, 211, 12),
    "vocab_size": (64, 212, 12),
    "num_target_layers": (64, 211, 14),
}


@pytest.mark.parametrize(("word", "shape"), SHAPES.items())
def test_check_fits(word, shape):
    config().check_fits(64, 211, 12)
    with pytest.raises(IncompatibleDrafterError, match=f"another target: its {word} is"):
        config().check_fits(*shape)


def test_check_fits_without_a_depth():
    shallow = config(num_target_layers=..., target_layer_ids=[1, 9])
    shallow.check_fits(64, 211, 10)
    with pytest.raises(IncompatibleDrafterError, match="reads layer 9 of 9"):
        shallow.check_fits(64, 211, 9)
