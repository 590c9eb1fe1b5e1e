"""The layouts of the published drafters, one by one, and where each decision is read from."""

import pytest

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def yarn(factor, original=4096, **more):
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return scaling | more


# drafter -> its fields beside BASE, what they resolve to, and the sources of some of them
PUBLISHED = {
    "Qwen3-4B-DFlash-b16: taps nested, block at the root": (
        {
            "num_hidden_layers": 5,
            "block_size": 16,
            "vocab_size": 151936,
            "num_target_layers": 36,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "layer_types": [FULL] * 5,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 5,
            "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        },
        {
            "block_size": 16,
            "mask_token_id": 151669,
            "target_layer_ids": (1, 9, 17, 25, 33),
            "rope_theta": 1e6,
            "windows": (None,) * 5,
            "causal": (False,) * 5,
        },
        {"block_size": "block_size", "target_layer_ids": "dflash_config.target_layer_ids"},
    ),
    "Qwen3.5-4B-DFlash: taps nested, depth at the root": (
        {
            "num_hidden_layers": 5,
            "block_size": 16,
            "num_target_layers": 32,
            "rope_theta": 1e7,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
        },
        {"target_layer_ids": (1, 8, 15, 22, 29), "windows": (None,) * 5},
        {"num_target_layers": "num_target_layers"},
    ),
    "Qwen3.5-27B-DFlash: everything at the root": (
        {
            "num_hidden_layers": 5,
            "block_size": 16,
            "mask_token_id": 248070,
            "target_layer_ids": [1, 16, 31, 46, 61],
            "num_target_layers": 64,
        },
        {"mask_token_id": 248070, "target_layer_ids": (1, 16, 31, 46, 61), "rope_theta": 10000.0},
        {"mask_token_id": "mask_token_id", "rope_theta": "default"},
    ),
    "Qwen3.5-122B-A10B-DFlash: windows without layer_types": (
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "sliding_window": 4096,
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 14, 26, 39],
            },
        },
        {
            "windows": (None, 4096, 4096, 4096),
            "causal": (False, True, True, True),
            "num_target_layers": None,
        },
        {"windows": "derived from use_sliding_window, max_window_layers, sliding_window"},
    ),
    "Qwen3.6-27B-DFlash: sliding layers, causal by the rule": (
        {
            "num_hidden_layers": 5,
            "block_size": 16,
            "layer_types": [SLIDING] * 4 + [FULL],
            "sliding_window": 2048,
            "num_target_layers": 64,
            "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31]},
        },
        {
            "windows": (2048,) * 4 + (None,),
            "causal": (True,) * 4 + (False,),
            "rope_theta": 1e7,
            "rope_scaling": None,
        },
        {
            "causal": "rule: sliding layers are causal, full ones are not",
            "rope_theta": "rope_parameters.rope_theta",
            "windows": "layer_types, sliding_window",
        },
    ),
    "Qwen3.6-35B-A3B-DFlash, April: full layers, YaRN": (
        {
            "num_hidden_layers": 8,
            "block_size": 16,
            "num_target_layers": 40,
            "rope_theta": 1e7,
            "rope_scaling": yarn(64.0),
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
        },
        {"rope_scaling": yarn(64.0), "target_layer_ids": (1, 10, 19, 28, 37)},
        {"rope_scaling": "rope_scaling"},
    ),
    "Qwen3.6-35B-A3B-DFlash, now: all nested, YaRN in rope_parameters": (
        {
            "num_hidden_layers": 6,
            "layer_types": [SLIDING] * 5 + [FULL],
            "sliding_window": 4096,
            "rope_parameters": yarn(64.0, rope_theta=1e7),
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            },
        },
        {
            "block_size": 16,
            "mask_token_id": 248077,
            "rope_scaling": yarn(64.0),
            "rope_theta": 1e7,
            "causal": (True,) * 5 + (False,),
        },
        {"rope_scaling": "rope_parameters", "block_size": "dflash_config.block_size"},
    ),
    "Qwen3-Coder-30B-A3B-DFlash: one field of each kind left out": (
        {
            "num_hidden_layers": 8,
            "block_size": 16,
            "num_target_layers": 48,
            "head_dim": None,
            "num_key_value_heads": None,
            "dflash_config": {
                "mask_token_id": 151669,
                "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
            },
        },
        {
            "head_dim": 80,
            "num_key_value_heads": 32,
            "target_layer_ids": (1, 7, 14, 20, 26, 32, 39, 45),
        },
        {"head_dim": "default"},
    ),
    "gpt-oss-20b-DFlash: blocks of 8, narrow heads, YaRN that is not truncated": (
        {
            "num_hidden_layers": 8,
            "block_size": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "num_target_layers": 24,
            "attention_bias": True,
            "rope_theta": 150000,
            "rope_scaling": yarn(32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
            "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
        },
        {
            "block_size": 8,
            "head_dim": 64,
            "attention_bias": True,
            "rope_scaling": yarn(32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
        },
        {"attention_bias": "attention_bias"},
    ),
    "Kimi-K2.5-DFlash: YaRN under its older name, with mscale": (
        {
            "num_hidden_layers": 6,
            "block_size": 8,
            "vocab_size": 163840,
            "num_target_layers": 61,
            "max_position_embeddings": 262144,
            "rope_scaling": {"type": "yarn", "factor": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
            "dflash_config": {
                "mask_token_id": 163838,
                "target_layer_ids": [1, 12, 24, 35, 47, 58],
            },
        },
        {
            "block_size": 8,
            "rope_scaling": yarn(64, original=262144, mscale=1.0, mscale_all_dim=1.0),
        },
        {"num_target_layers": "num_target_layers"},
    ),
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat: the target's own rope": (
        {
            "num_hidden_layers": 5,
            "block_size": 10,
            "vocab_size": 128256,
            "num_target_layers": 32,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "dflash_config": {"mask_token_id": 128255, "target_layer_ids": [1, 8, 15, 22, 29]},
        },
        {"block_size": 10, "target_layer_ids": (1, 8, 15, 22, 29), "rope_theta": 5e5},
        {"rope_scaling": "rope_scaling"},
    ),
    "gemma-4-31B-it-DFlash: a small mask id, an embedding scale": (
        {
            "num_hidden_layers": 5,
            "block_size": 16,
            "vocab_size": 262144,
            "num_target_layers": 60,
            "layer_types": [SLIDING] * 4 + [FULL],
            "sliding_window": 2048,
            "input_embedding_scale": 1.5,
            "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57]},
        },
        {"mask_token_id": 4, "input_embedding_scale": 1.5, "final_logit_softcapping": None},
        {"input_embedding_scale": "input_embedding_scale"},
    ),
    "Qwen3.8-27B-DFlash2: trained for 8, run at 16 where only the root is read": (
        {
            "architectures": ["DFlash2DraftModel"],
            "num_hidden_layers": 5,
            "block_size": 16,
            "layer_types": [SLIDING] * 5,
            "sliding_window": 2048,
            "is_causal": False,
            "num_target_layers": 64,
            "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                **DFLASH2,
            },
        },
        {
            "block_size": 8,
            "causal": (False,) * 5,
            "windows": (2048,) * 5,
            "is_dflash2": True,
            "output_multiplier": 1.0,
            **DFLASH2,
        },
        {
            "block_size": "dflash_config.block_size",
            "causal": "is_causal",
            "selector_top_k": "dflash_config.selector_top_k",
        },
    ),
    "Muse-Glimmer-30B-DFlash2: multiplier and soft cap": (
        {
            "architectures": ["DFlash2DraftModel"],
            "num_hidden_layers": 5,
            "vocab_size": 202048,
            "layer_types": [SLIDING] * 5,
            "sliding_window": 2048,
            "is_causal": False,
            "rope_theta": 5e5,
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 201818,
                "target_layer_ids": [1, 13, 25, 37, 49],
                "output_multiplier": 0.19611613513818404,
                "final_logit_softcapping": 20.0,
                **DFLASH2,
            },
        },
        {
            "block_size": 16,
            "output_multiplier": 0.19611613513818404,
            "final_logit_softcapping": 20.0,
            "rope_theta": 5e5,
        },
        {"final_logit_softcapping": "dflash_config.final_logit_softcapping"},
    ),
    "stored quantized, as mlx-lm writes it": (
        {
            "num_hidden_layers": 5,
            "block_size": 16,
            "num_target_layers": 32,
            "quantization": {"group_size": 64, "bits": 4},
            "quantization_config": {"group_size": 64, "bits": 4},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "dflash_config": {
                "mask_token_id": 248070,
                "target_layer_ids": [1, 16, 31],
                "causal": True,
            },
        },
        {
            "quantization": {"group_size": 64, "bits": 4},
            "causal": (True,) * 5,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        {"causal": "dflash_config.causal", "quantization": "quantization"},
    ),
}


def resolve(**fields):
    return DraftConfig.from_dict({**BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "expected", "sources"), PUBLISHED.values(), ids=[name[:30] for name in PUBLISHED]
)
def test_published_layouts(fields, expected, sources):
    config = resolve(**fields)
    assert {name: getattr(config, name) for name in expected} == expected
    said = {decision.field: decision.source for decision in config.describe()}
    assert {name: said[name] for name in sources} == sources
    for decision in config.describe():
        assert decision.value == getattr(config, decision.field)


MINIMAL = {
    "num_hidden_layers": 3,
    "block_size": 8,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 5, 9]},
}
TWO = {"architectures": ["DFlash2DraftModel"]}


def nested(**fields):
    return {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 5, 9], **fields}}


WRONG = {
    "architectures": {"architectures": ["Eagle3DraftModel"]},
    "dflash_config.projector": nested(projector="mlp"),
    "dflash_config.selector_rank is not understood": nested(selector_rank=16),
    "conv_kernel_size is missing": TWO,
    "selector_top_k is missing": TWO
    | nested(conv_kernel_size=2, conv_group_size=16, selector_rank=256),
    "dflash_config.conv_group_size must divide 2560": TWO
    | nested(**DFLASH2 | {"conv_group_size": 48}),
    "dflash_config.conv_kernel_size must": TWO | nested(**DFLASH2 | {"conv_kernel_size": 0}),
    "dflash_config.selector_top_k must": TWO | nested(**DFLASH2 | {"selector_top_k": 10**6}),
    "dflash_config.output_multiplier must": nested(output_multiplier=0),
    "dflash_config.final_logit_softcapping must": nested(final_logit_softcapping=-30.0),
    "dflash_config.input_embedding_scale must": nested(input_embedding_scale=float("nan")),
    "is_causal contradicts causal": {"is_causal": True, "causal": False},
    "rope_scaling.factor is missing": {"rope_scaling": {"rope_type": "yarn"}},
    "rope_scaling.factor must": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "rope_scaling.truncate must": {"rope_scaling": yarn(4.0, truncate="no")},
    "rope_scaling.extrapolation_factor is not": {"rope_scaling": yarn(4.0, extrapolation_factor=1)},
    "rope_scaling.rope_type has": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
    "rope_parameters.sliding_attention is not": {
        "rope_parameters": {SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6}}
    },
    "rope_parameters.partial_rotary_factor must": {
        "rope_parameters": {"partial_rotary_factor": 0.25}
    },
    "max_window_layers is missing": {"use_sliding_window": True, "sliding_window": 64},
    "mlp_bias must": {"mlp_bias": True},
    "draft_vocab_size must": {"draft_vocab_size": 32000},
    "target_hidden_size must": {"target_hidden_size": 5120},
    "quantization_config is not": {
        "quantization_config": {"bits": 4, "group_size": 128, "quant_method": "gptq"}
    },
    "quantization is not": {"quantization": {"mode": "mxfp4"}},
}


@pytest.mark.parametrize(("words", "fields"), WRONG.items())
def test_what_is_not_understood_is_an_error_that_names_the_field(words, fields):
    with pytest.raises(ConfigError) as caught:
        resolve(**{**MINIMAL, **fields})
    assert str(caught.value).startswith(f"drafter config: {words}")


def test_the_minimal_config_is_fine():
    assert resolve(**MINIMAL).target_layer_ids == (1, 5, 9)
