"""A config's fields are computed, or refused by name; none is silently ignored."""

import math
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from ggufs import ROWS, gguf_of, write
from tinymodels import SHAPE, save_target

from dflash_mlx.errors import ConfigError
from dflash_mlx.loading.config_gaps import build_model, cap_context
from dflash_mlx.loading.folder import Folder
from dflash_mlx.loading.gguf.gguf_file import converted
from dflash_mlx.loading.load import load_target
from dflash_mlx.loading.target_loader import read_target

YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
KEYS = {
    "yarn": YARN,
    "yarn with every key": YARN
    | {"attn_factor": 1.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0},
    "linear": {"type": "linear", "factor": 4.0},
    "a factor alone": {"factor": 4.0},
}


def rotation(keys: dict[str, Any], dims: int, base: float) -> tuple[np.ndarray, float]:
    """A rotation's frequencies [dims / 2], and the factor of queries and keys.

    For YaRN, these are those of arXiv 2309.00071, section 3.
    """
    factor = keys["factor"]
    frequencies = base ** -(np.arange(0, dims, 2) / dims)
    if keys.get("type") != "yarn":
        return frequencies / factor, 1.0
    turns = keys["original_context_length"] * frequencies / (2 * math.pi)
    bounds = [keys.get(f"yarn_beta_{name}", usual) for name, usual in (("fast", 32), ("slow", 1))]
    slope = np.log(turns[0] / turns[1])
    low, high = (math.log(turns[0] / bound) / slope for bound in bounds)
    low = max(math.floor(low), 0)
    high = min(math.ceil(high), dims - 1)
    kept = 1 - np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
    scale = keys.get("attn_factor", 1.0) * (0.1 * math.log(factor) + 1)
    return frequencies * kept + frequencies / factor * (1 - kept), scale


def measured_rotation(rope: Any) -> tuple[np.ndarray, float]:
    """The frequencies [dims / 2] of a rope of mlx-lm, and its factor, from its rotation of ones.

    Position 0 is not rotated, so it shows the factor. The angle between the vectors of position 0
    and position 1 is the frequency.
    """

    def components(row: np.ndarray) -> np.ndarray:
        """The two components [2, dims / 2] of each rotated vector."""
        return row.reshape(-1, 2).T if rope.traditional else row.reshape(2, -1)

    ones = mx.ones((1, 1, 2, rope.dims))
    first, second = np.array(rope(ones))[0, 0]
    x0, y0 = components(first)
    x1, y1 = components(second)
    return np.arctan2(x0 * y1 - y0 * x1, x0 * x1 + y0 * y1), float(x0[0])


# Architectures for which a scaled rotation may be refused.
REFUSING = {"gemma4", "gemma4moe", "nemotron_h", "nemotron_h_moe", "phi3", "qwen2moe"}


@pytest.mark.filterwarnings("ignore:.*sliding window of gemma2")
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("name", ROWS)
def test_rope_keys_of_gguf_files_are_computed_or_refused(
    tmp_path: Path, name: str, keys: dict
) -> None:
    metadata, tensors, plain = gguf_of(name, rope_scaling=None)
    kind = metadata["general.architecture"]
    metadata = {k: v for k, v in metadata.items() if ".rope.scaling." not in k}
    more = {f"{kind}.rope.scaling.{key}": value for key, value in keys.items()}
    write(tmp_path / "a.gguf", metadata=metadata | more, tensors=tensors, kinds={})
    latent = kind == "deepseek2"  # whose attention's scale contains the factor
    try:
        folder = converted(tmp_path / "a.gguf", True)
        ropes = dict(read_target(Folder(folder))[0].named_modules())
    except ConfigError as error:
        assert "rope" in str(error) and "\n" not in str(error)
        assert name in REFUSING or (latent and "attn_factor" in str(error))
        return
    outer = "" if name != "qwen3next" else "language_model."
    rotating = [path for path, module in plain.named_modules() if hasattr(module, "base")]
    if name == "gemma3":
        rotating = ["model.layers.5.self_attn.rope"]
    for path in rotating:
        module = dict(plain.named_modules())[path]
        frequencies, factor = rotation(keys, module.dims, module.base)
        our_frequencies, our_factor = measured_rotation(ropes[outer + path])
        assert np.allclose(our_frequencies, frequencies, rtol=1e-3, atol=1e-6)
        assert np.isclose(our_factor, 1.0 if latent else factor)
    assert rotating


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3moe", "expert_gating_func", 2),
        ("qwen3moe", "expert_weights_norm", False),
        ("qwen2moe", "expert_weights_norm", True),
        ("minimax-m2", "expert_weights_scale", 2.5),
        ("minimax-m2", "expert_gating_func", 1),
        ("nemotron_h_moe", "expert_gating_func", 1),
        ("qwen3", "expert_shared_count", 1),
        ("llama", "attention.causal", False),
        ("llama", "rope.scaling.attn_factor", 2.0),
        ("llama", "rope.dimension_count_swa", 8),
        ("qwen3", "attention.sliding_window", 64),
    ],
)
def test_keys_of_gguf_files_that_are_not_computed_are_refused(
    tmp_path: Path, name: str, key: str, value: Any
) -> None:
    metadata, tensors, _ = gguf_of(name)
    kind = metadata["general.architecture"]
    write(
        tmp_path / "a.gguf", metadata=metadata | {f"{kind}.{key}": value}, tensors=tensors, kinds={}
    )
    with pytest.raises(ConfigError, match=f"{kind}.{key} is "):
        converted(tmp_path / "a.gguf", True)


SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
MOE |= {
    "tie_word_embeddings": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SCALED = {"rope_scaling": SCALING, "rope_theta": 5e5}
NEOX = {"rotary_pct": 0.25, "rotary_emb_base": 1e4, "layer_norm_eps": 1e-5}
NEOX |= {"use_parallel_residual": True}


@pytest.mark.parametrize(
    ("kind", "more", "field"),
    [
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("gemma2", {"hidden_activation": "silu", "query_pre_attn_scalar": 16}, "hidden_activation"),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen3_moe", MOE | {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ("qwen3_moe", MOE | {"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
        ("qwen3_moe", MOE | {"scoring_func": "sigmoid"}, "scoring_func"),
        ("qwen3_moe", MOE | {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3", {"is_causal": False}, "is_causal"),
        ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen3", {"no_rope_layers": [], "attn_logit_softcapping": 0.0}, None),
        ("qwen3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3", {"use_bidirectional_attention": "vision"}, None),
        ("phi", {"hidden_act": "gelu_new"}, None),
        ("phi", {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta"),
        ("llama", {"hidden_act": "silu", "attn_logit_softcapping": None, "n_group": 1}, None),
        ("llama", {"n_group": 8, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"}, None),
        ("qwen3", {"no_rope_layers": [1] * 3}, None),
        ("qwen3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ("nanochat", {"final_logit_softcapping": 15.0, "hidden_act": "relu2"}, None),
        ("gpt_neox", NEOX | {"rope_parameters": {"partial_rotary_factor": 0.25}}, None),
        ("glm", {"partial_rotary_factor": 0.5, "head_dim": 16}, "partial_rotary_factor"),
    ],
)
def test_fields_that_a_class_does_not_read_are_refused(
    kind: str, more: dict[str, Any], field: str | None
) -> None:
    config = SHAPE | {"model_type": kind, "vocab_size": 64, "tie_word_embeddings": True} | more
    if field is None:
        assert build_model("a", config)
        return
    with pytest.raises(ConfigError, match=f"mlx-lm's {kind} does not compute {field} ") as caught:
        build_model("a", config)
    assert "\n" not in str(caught.value)


def test_no_rope_layers_are_accepted_only_if_they_are_those_of_the_class() -> None:
    """Llama 4's class always leaves every fourth layer without rotation; newer configs say so."""
    text = SHAPE | SCALED | {"num_hidden_layers": 8, "head_dim": 16, "vocab_size": 64}
    text |= {"attention_chunk_size": 8192, "interleave_moe_layer_step": 1, "use_qk_norm": True}
    text |= {"intermediate_size_mlp": 64, "num_experts_per_tok": 1, "num_local_experts": 2}
    text |= {"attention_bias": False, "model_type": "llama4_text"}
    config = {"model_type": "llama4", "text_config": text | {"no_rope_layers": [1, 1, 1, 0] * 2}}
    assert build_model("a", config)
    text["no_rope_layers"] = [1, 0] * 4
    with pytest.raises(ConfigError, match="no_rope_layers"):
        build_model("a", config | {"text_config": text})


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "gemma2", "lfm2"])
def test_newer_spellings_of_a_rotation_are_read(kind: str) -> None:
    """`rope_parameters` is read even if mlx-lm's class does not know it or reads only theta."""
    older = {"rope_theta": 5e5, "rope_scaling": SCALING}
    newer = {"rope_parameters": SCALING | {"rope_theta": 5e5}}
    config = SHAPE | MOE | {"model_type": kind, "vocab_size": 64, "layer_types": None}
    config |= {"num_local_experts": 4, "norm_eps": 1e-6, "conv_bias": False, "conv_L_cache": 3}
    config |= {"block_dim": 64, "block_ff_dim": 64, "block_multiple_of": 1, "rope_theta": None}
    config |= {"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
    config |= {"query_pre_attn_scalar": 16, "full_attn_idxs": [0], "rope_traditional": False}
    ropes = []
    for spelling in (older, newer):
        modules = build_model("a", config | spelling).modules()
        ropes.append([measured_rotation(rope) for rope in modules if hasattr(rope, "traditional")])
    expected_frequencies, expected_factor = rotation(YARN, 16, 5e5)
    for frequencies, factor in (*ropes[0], *ropes[1]):
        assert np.allclose(frequencies, expected_frequencies, rtol=1e-3, atol=1e-6)
        assert np.isclose(factor, expected_factor)
    assert len(ropes[0]) == len(ropes[1]) > 0


@pytest.mark.filterwarnings("ignore:.*rotates by longrope")
def test_the_kind_of_a_rotation_may_be_called_rope_type() -> None:
    """Transformers writes `rope_type`, but Phi-4-mini's class in mlx-lm reads `type`."""
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    scaling |= {"long_factor": [2.0] * 6, "short_factor": [1.0] * 6}
    scaling |= {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
    config = SHAPE | {"model_type": "phi3", "vocab_size": 64, "rope_parameters": scaling}
    rope = build_model("a", config).model.layers[0].self_attn.rope
    assert type(rope).__name__ == "SuScaledRoPE" and rope.dim == 12


def test_an_attention_factor_is_computed() -> None:
    scaling = SCALING | {"attention_factor": 1.5}
    model = build_model(
        "a", SHAPE | {"model_type": "llama", "vocab_size": 64, "rope_scaling": scaling}
    )
    assert measured_rotation(model.model.layers[0].self_attn.rope)[1] == 1.5


def test_a_window_that_is_not_computed_limits_the_context(tmp_path: Path) -> None:
    """Up to the window's length, full attention gives the same result. A warning says so."""
    folder = save_target(tmp_path, sliding_window=64)
    with pytest.warns(UserWarning, match=r"qwen3 does not compute the sliding window .* 64 tokens"):
        assert load_target(str(folder)).context_length == 64
    for more in (
        {"use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
        {"max_window_layers": 0},  # off by default
        {"max_window_layers": 28, "use_sliding_window": True},
    ):
        folder = save_target(tmp_path, sliding_window=64, **more)
        assert load_target(str(folder)).context_length > 64


def test_an_attention_temperature_that_is_not_computed_limits_the_context() -> None:
    """Below position `floor_scale` the temperature is 1, and need not be computed."""
    config = SHAPE | {"model_type": "llama4_text", "vocab_size": 64, "tie_word_embeddings": True}
    config |= {"no_rope_layers": [1, 0, 1], "use_qk_norm": True, "intermediate_size_mlp": 64}
    config |= {"attn_temperature_tuning": True, "floor_scale": 128}
    with pytest.warns(UserWarning, match="attention temperature of a, .* 127 tokens"):
        assert cap_context("a", build_model("a", config), config)["max_position_embeddings"] == 127


LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 4.0] * 4}
LONG: dict[str, Any] = {"model_type": "phi3", "vocab_size": 64, "rope_scaling": LONGROPE}
LONG |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}
PHIMOE = {"model_type": "phimoe", "num_local_experts": 2, "lm_head_bias": False}


def longrope(config: dict[str, Any], factors: list[float]) -> tuple[np.ndarray, float]:
    """Frequencies and amplitude of LongRoPE: arXiv 2402.13753, section 3 and the appendix."""
    base = 1e4 ** -(np.arange(0, 16, 2) / 16)
    stretch = config["max_position_embeddings"] / 64
    return base / factors, math.sqrt(1 + math.log(max(stretch, 1)) / math.log(64))


@pytest.mark.parametrize("length", [32, 64, 65, 512])
@pytest.mark.parametrize("spelling", ["at the root", "nested", "rope_parameters", "phimoe"])
def test_the_context_length_decides_which_factors_of_longrope_are_used(
    length: int, spelling: str
) -> None:
    """Beyond the original 64 tokens these are the long ones, with a warning."""
    config = SHAPE | LONG | {"max_position_embeddings": length}
    if spelling != "at the root":
        config.pop("original_max_position_embeddings")
        nested = LONGROPE | {"original_max_position_embeddings": 64}
        config["rope_scaling"] = nested
        if spelling == "rope_parameters":
            config["rope_parameters"] = nested | {"rope_theta": 1e4}
            del config["rope_scaling"], config["rope_theta"]
    if spelling == "phimoe":
        config |= PHIMOE
        config["rope_scaling"] = nested | {"short_mscale": 1.2, "long_mscale": 1.3}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build_model("a", config)
    part = "short_factor" if length <= 64 else "long_factor"
    frequencies, amplitude = longrope(config, LONGROPE[part])
    if spelling == "phimoe":
        amplitude = 1.2 if length <= 64 else 1.3
    rope = model.model.layers[0].self_attn.rope
    ones = mx.ones((1, 1, 2, 16))
    first, second = np.array(rope(ones))[0, 0]
    left = second[:8]
    right = second[8:]
    angles = np.arctan2(right - left, right + left)
    assert np.allclose(angles, frequencies, rtol=1e-3, atol=1e-5)
    assert np.isclose(first[0], amplitude)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (1 if length > 64 else 0)
    assert all("longrope" in message and "64" in message for message in messages)
