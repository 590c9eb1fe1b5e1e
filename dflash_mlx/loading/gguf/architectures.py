"""GGUF's architectures as models of mlx-lm: architectures.toml, and what has to be computed.

The keys are those of github.com/ggml-org/ggml, docs/gguf.md; the fields are those of mlx-lm's
`ModelArgs`. The gguf package names the tensors.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from ...errors import ConfigError
from ..folder import MAX_LAYERS
from .header import Header
from .layout import Config

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192  # tokens of the texts that Llama 3 was first trained with
ROPE_DIVISORS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
# Architectures that may rotate only a part of each head.
_PARTLY_ROTATED = {"phi3", "glm4", "qwen3next", "qwen35", "qwen35moe", "minimax-m2", "deepseek2"}
_SIGMOID = 2  # of expert_gating_func
# How Mixtral chooses and weighs experts.
_SOFTMAX = {"expert_gating_func": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0}
_REQUIRED = object()


def architectures() -> dict[str, dict[str, Any]]:
    """The rows of architectures.toml by GGUF's name, each with the values of the row "all"."""
    table = tomllib.loads(files(__package__).joinpath("architectures.toml").read_text("utf-8"))
    common = table.pop("all")
    for row in table.values():
        for part, values in common.items():
            row[part] = values | row.get(part, {})
    return table


class Fields:
    """The values of one architecture: `fields("block_count")`."""

    def __init__(self, path: object, kind: str, header: Header) -> None:
        self.path = path
        self.tensors = header.tensors
        self._kind = kind
        self._metadata = header.metadata
        self._read: set[str] = set()

    def __call__(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key. Raises `ConfigError` if it is missing, or a number is too large."""
        self._read.add(name)
        value = self._metadata.get(f"{self._kind}.{name}", default)
        if value is _REQUIRED:
            raise ConfigError(f"{self.path}: {self._kind}.{name} is missing.")
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if isinstance(number, int | float) and not 0 <= number < 2**31:
                raise self.wrong(name, number)
        return value

    def first(self, names: str | list[Any]) -> Any:
        """The value of the first of these keys that the file has.

        Args:
            names: one key or several, as in architectures.toml. None if no key is there and the
                last one ends with "?"; without that, a missing key is a `ConfigError`.
        """
        names = names if isinstance(names, list) else [names]
        # Every key is looked up, because that marks it as read.
        values = [self(key.rstrip("?"), None) if isinstance(key, str) else key for key in names]
        for value in values:
            if value is not None:
                return value
        if names[-1].endswith("?"):
            return None
        return self(names[0])  # raises the error for a missing key

    def by_layer(self, name: str, layers: int) -> list[Any]:
        """A value for each layer. Raises `ConfigError`."""
        value = self(name)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers:
            raise self.wrong(name, value)
        return values

    def check_all_read(self, ignored: Mapping[str, str]) -> None:
        """Raise `ConfigError` for a key that may change what the model computes."""
        for key, value in self._metadata.items():
            prefix, _, name = key.partition(".")
            if prefix == self._kind and name not in {*self._read, *ignored} and value:
                raise ConfigError(f"{self.path}: {key} is not understood.")

    def check_fixed(self, values: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a key with another value than mlx-lm's model computes with."""
        for name, value in values.items():
            actual = self(name, value)
            if actual != value:
                raise self.wrong(name, actual)

    def wrong(self, name: str, value: Any) -> ConfigError:
        """Make the error for a value that no model of this architecture has."""
        return ConfigError(f"{self.path}: {self._kind}.{name} is {str(value)[:40]}.")

    def vector(self, name: str) -> np.ndarray | None:
        """A tensor of float32 numbers; None without it. Raises `ConfigError`."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != GGMLQuantizationType.F32:
            raise ConfigError(f"{self.path}: {name} is stored as {tensor.type.name}, not as F32.")
        return tensor.blocks().view(np.float32).reshape(-1)

    def scaling(self, head_dim: int, theta: float) -> Config | None:
        """mlx-lm's `rope_scaling`: by the metadata, or by the tensors that divide frequencies.

        Keys are read as llama.cpp reads them: a factor without a type is linear, and YaRN's
        attention factor multiplies its usual one. Raises `ConfigError` for another scaling.
        """
        divisors = self.vector(ROPE_DIVISORS)
        factor = self("rope.scaling.factor", self("rope.scale_linear", 0.0)) or 1.0
        kind = self("rope.scaling.type", "linear")
        if kind == "linear" and factor == 1:
            kind = "none"
        length = self("context_length")
        original = self("rope.scaling.original_context_length", length)
        attention_factor = self("rope.scaling.attn_factor", None)
        if kind == "none" and divisors is not None:
            return self._llama3(divisors, head_dim, theta)
        long = self.vector(LONG)
        short = self.vector(SHORT)
        if long is not None and short is not None and kind in ("none", "longrope"):
            usual = 1.0  # LongRoPE's amplitude (arXiv 2402.13753)
            if length > original > 1:
                usual = math.sqrt(1 + math.log(length / original) / math.log(original))
            self._check_attention_factor(attention_factor, usual)
            factors = {"long_factor": long.tolist(), "short_factor": short.tolist()}
            return {"type": "longrope", **factors}
        if divisors is not None:
            raise self.wrong("rope.scaling.type", kind)
        if kind == "yarn":
            return self._yarn(factor, original, attention_factor)
        if kind not in ("none", "linear"):
            raise self.wrong("rope.scaling.type", kind)
        self._check_attention_factor(attention_factor, 1.0)
        return None if kind == "none" else {"type": kind, "factor": factor}

    def _check_attention_factor(self, factor: float | None, usual: float) -> None:
        """Raise `ConfigError` for an attention factor other than mlx-lm's, up to rounding (1%)."""
        if factor is not None and abs(factor - usual) > 0.01 * usual:
            raise self.wrong("rope.scaling.attn_factor", factor)

    def _yarn(self, factor: float, original: int, attention_factor: float | None) -> Config:
        """YaRN's `rope_scaling`, for a model that was first trained with `original` tokens."""
        scaling = {"type": "yarn", "factor": factor}
        for name in ("beta_fast", "beta_slow"):
            beta = self(f"rope.scaling.yarn_{name}", None)
            if beta is not None:
                scaling[name] = beta
        scaling["original_max_position_embeddings"] = original
        if attention_factor is not None and attention_factor != 1:
            usual = 0.1 * math.log(factor) + 1  # YaRN's attention factor (arXiv 2309.00071)
            scaling["attention_factor"] = attention_factor * usual
        return scaling

    def _llama3(self, divisors: np.ndarray, head_dim: int, theta: float) -> Config:
        """Llama 3's `rope_scaling`. Raises `ConfigError` if it computes other divisors."""
        factor = float(divisors.max())
        fits = len(divisors) == head_dim // 2
        ours = llama3_divisors(head_dim, theta, factor)
        if not fits or not np.allclose(divisors, ours, rtol=1e-3):
            raise ConfigError(f"{self.path}: rope_freqs are not those of Llama 3.")
        length = {"original_max_position_embeddings": _LLAMA3_LENGTH}
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3, **length}


def read_config(path: object, header: Header) -> Config:
    """The config.json of a GGUF file, without its quantization.

    Raises `ConfigError` for another architecture, or a field that is missing or unknown.
    """
    kind = header.metadata.get("general.architecture")
    rows = architectures()
    if kind not in rows:
        raise ConfigError(
            f"{path}: the architecture is {str(kind)[:40]!r}, which is not supported. These are: "
            f"{', '.join(rows)}."
        )
    row = rows[kind]
    fields = Fields(path, kind, header)
    layers = fields("block_count") - fields("nextn_predict_layers", 0)
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS:
        raise fields.wrong("block_count", layers)
    heads = fields("attention.head_count")
    width = fields("embedding_length")
    head_dim = fields("attention.key_length", width // heads)
    rotated = fields("rope.dimension_count", head_dim)
    theta = fields("rope.freq_base", 10000.0)
    if rotated != head_dim and kind not in _PARTLY_ROTATED:
        raise fields.wrong("rope.dimension_count", rotated)
    config = {
        "from_gguf": True,
        "model_type": row["model_type"],
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "rope_scaling": None if kind == "gemma4" else fields.scaling(head_dim, theta),
        "partial_rotary_factor": rotated / head_dim,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        **row.get("constants", {}),
        **{name: fields.first(keys) for name, keys in row["keys"].items()},
        **{
            name: fields(dividend) // fields(divisor)
            for name, (dividend, divisor) in row.get("quotients", {}).items()
        },
    }
    if kind in _DERIVED:
        config |= _DERIVED[kind](fields, config)
    fields.check_fixed(row["fixed"] | {"rope.dimension_count_swa": config["head_dim"]})
    fields.check_all_read(row["ignored"])
    return {name: value for name, value in config.items() if value is not None}


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """The divisors of Llama 3.1's rotation frequencies, [head_dim / 2].

    Wavelengths below `_LLAMA3_LENGTH` / `high_freq_factor` keep their frequency. Those above
    `_LLAMA3_LENGTH` / `low_freq_factor` are divided by `factor`. Those between are blended (Llama
    3.1's reference code, `apply_scaling`).
    """
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((_LLAMA3_LENGTH / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _llama(fields: Fields, config: Config) -> Config:
    """Mixtral's files also name this architecture."""
    experts = fields("expert_count", 0)
    if not experts:
        return {}
    fields.check_fixed(_SOFTMAX)
    used = fields("expert_used_count")
    return {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used}


def _gemma(fields: Fields, config: Config) -> Config:
    """The scale of attention, which the largest model of each generation computes differently."""
    largest = config["num_hidden_layers"] in (46, 62)  # Gemma 2 27B, Gemma 3 27B
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if largest else config["head_dim"]}


def _gemma4(fields: Fields, config: Config) -> Config:
    """Two kinds of layers, with heads of two sizes; the last layers share keys and values."""
    experts = fields("expert_count", 0)
    layers = config["num_hidden_layers"]
    divisors = fields.vector(ROPE_DIVISORS)
    sliding = fields.by_layer("attention.sliding_window_pattern", layers)
    # The number of key heads by whether a layer has a sliding window.
    heads = dict(zip(sliding, fields.by_layer("attention.head_count_kv", layers), strict=True))
    sizes = fields.by_layer("feed_forward_length", layers)
    # Divisors other than 1 are so large that they stop a rotation.
    rotated_share = 1.0 if divisors is None else float((divisors == 1).mean())
    full = {"rope_theta": config["rope_theta"], "partial_rotary_factor": rotated_share}
    local = {"rope_theta": fields("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    # Without a tensor of values, a layer uses its keys as values. The last layers have neither.
    uses_keys_as_values = False
    for layer in range(layers - config["num_kv_shared_layers"]):
        if f"blk.{layer}.attn_v.weight" not in fields.tensors:
            uses_keys_as_values = True
    return {
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "num_key_value_heads": heads.get(True, heads.get(False)),
        "num_global_key_value_heads": heads.get(False),
        "attention_k_eq_v": uses_keys_as_values,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[0] != sizes[-1],
        "vocab_size_per_layer_input": config["vocab_size"],
        "enable_moe_block": experts > 0,
        "num_experts": experts,
        "top_k_experts": fields("expert_used_count", 0),
        "moe_intermediate_size": fields("expert_feed_forward_length", 0),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", **full},
            "sliding_attention": local,
        },
    }


def _linear(fields: Fields, config: Config) -> Config:
    """Qwen's layers of linear attention."""
    rotation = {name: config[name] for name in ("rope_theta", "partial_rotary_factor")}
    return {"rope_parameters": rotation | (config["rope_scaling"] or {"type": "default"})}


def _deepseek2(fields: Fields, config: Config) -> Config:
    """DeepSeek-V3 and models with its layers. V2 is refused: it chooses experts by a softmax."""
    gating = fields("expert_gating_func", 0)
    if gating != _SIGMOID:
        raise fields.wrong("expert_gating_func", gating)
    if config["rope_scaling"]:
        fields.check_fixed({"rope.scaling.attn_factor": 1.0})
        # The file has a tenth of mscale.
        amount = 10 * fields("rope.scaling.yarn_log_multiplier", 0.0)
        config["rope_scaling"] |= {"mscale": amount, "mscale_all_dim": amount}
    heads = config["num_attention_heads"]  # files say 1, for the latents that heads share
    nope = fields("attention.key_length_mla") - config["qk_rope_head_dim"]
    return {"num_key_value_heads": heads, "qk_nope_head_dim": nope}


def _lfm2(fields: Fields, config: Config) -> Config:
    """Layers of attention, and of convolution, which have no key heads."""
    heads = fields.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    kinds = ["full_attention" if count else "conv" for count in heads]
    return {"num_key_value_heads": max(heads), "layer_types": kinds}


def _nemotron_h(fields: Fields, config: Config) -> Config:
    """Mamba, attention and MLP or expert layers, told apart by their heads and neurons."""
    mlp = "E" if fields("expert_count", 0) else "-"
    layers = config["num_hidden_layers"]
    heads = fields.by_layer("attention.head_count_kv", layers)
    sizes = fields.by_layer("feed_forward_length", layers)
    kinds = []
    for head_count, size in zip(heads, sizes, strict=True):
        if head_count:
            kinds.append("*")
        else:
            kinds.append(mlp if size else "M")
    return {
        "num_key_value_heads": max(heads),
        "intermediate_size": max(sizes),
        "hybrid_override_pattern": kinds,
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in fields.tensors),
    }


_DERIVED = {
    "llama": _llama,
    "qwen3next": _linear,
    "qwen35": _linear,
    "qwen35moe": _linear,
    "deepseek2": _deepseek2,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": _gemma4,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
}
