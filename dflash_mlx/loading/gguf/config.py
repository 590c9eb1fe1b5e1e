"""A GGUF file's metadata as the config.json that mlx-lm reads.

Keys are those of github.com/ggml-org/ggml, docs/gguf.md; what they become are the fields of
mlx-lm's `ModelArgs`. A key that would change the arithmetic and has no field is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError

# Architecture -> whether its converter permutes the rows of q and k (llama.cpp's
# conversion of Llama pairs neighbours in the rotation; Qwen's pairs halves, as mlx-lm does).
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
# Keys of an architecture that are understood; any other of the groups below is refused.
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
}
_HARMLESS = {"rope.scaling.finetuned", "attention.causal"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}


def read_config(
    path: object,
    metadata: Mapping[str, Any],
    names: frozenset[str],
    vocab_size: int,
    rope_divisors: np.ndarray | None = None,
) -> dict[str, Any]:
    """The config.json of a GGUF file, without its quantization.

    Args:
        path: the file, for messages.
        metadata: its metadata.
        names: its tensors' names: they say what has a bias, and whether the head is tied.
        vocab_size: rows of its embedding.
        rope_divisors: its rope_freqs, which the rotation's frequencies are divided by.

    Raises `ConfigError` for another architecture, a field that is missing or not understood.
    """
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: the architecture is {str(kind)[:40]!r}; of GGUF files, "
            f"{', '.join(ARCHITECTURES)} are read."
        )
    fields = _Fields(path, str(kind), metadata)
    fields.check_known()
    heads = fields.whole("attention.head_count")
    width = fields.whole("embedding_length")
    head_dim = fields.whole("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.whole(name, head_dim) != head_dim:
            raise ConfigError(f"{path}: {kind}.{name} is not the size of a head, {head_dim}.")
    theta = fields.number("rope.freq_base", 10000.0)
    config = {
        "model_type": kind,
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]],
        "hidden_size": width,
        "num_hidden_layers": fields.whole("block_count"),
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": fields.scaling(head_dim, theta, rope_divisors),
        "vocab_size": vocab_size,
        "max_position_embeddings": fields.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
    }
    config["architectures"] = [config["architectures"][0] + "ForCausalLM"]
    return config


class _Fields:
    """The metadata of one architecture, each value checked as it is read."""

    def __init__(self, path: object, kind: str, metadata: Mapping[str, Any]) -> None:
        self._path, self._kind, self._metadata = path, kind, metadata

    def check_known(self) -> None:
        """Raise `ConfigError` for a key that may change what the model computes."""
        prefix = f"{self._kind}."
        for key, value in self._metadata.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in _KNOWN | _HARMLESS and value:
                raise ConfigError(f"{self._path}: {key} is not understood.")

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(name, value)
        return float(value)

    def scaling(
        self, head_dim: int, theta: float, divisors: np.ndarray | None
    ) -> dict[str, Any] | None:
        """mlx-lm's `rope_scaling`: linear or yarn by the metadata, llama3 by its divisors."""
        kind = self._get("rope.scaling.type", "none")
        if divisors is not None:
            return self._llama3(head_dim, theta, divisors)
        if kind == "none":
            return None
        scaling: dict[str, Any] = {"type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "linear":
            return scaling
        if kind == "yarn":
            length = self.whole("rope.scaling.original_context_length")
            return scaling | {"original_max_position_embeddings": length}
        raise self._wrong("rope.scaling.type", kind)

    def _llama3(self, head_dim: int, theta: float, divisors: np.ndarray) -> dict[str, Any]:
        """The scaling of Llama 3.1 and later, of which a GGUF file keeps only the outcome."""
        factor = float(divisors.max())
        if divisors.shape == (head_dim // 2,) and np.allclose(
            divisors, llama3_divisors(head_dim, theta, factor), rtol=1e-3
        ):
            low, high, length = _LLAMA3.values()
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(length),
            }
        raise ConfigError(f"{self._path}: rope_freqs are not those of Llama 3; not understood.")

    def _get(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"{self._kind}.{name}", default)

    def _wrong(self, name: str, value: Any) -> ConfigError:
        if value is None:
            return ConfigError(f"{self._path}: {self._kind}.{name} is missing.")
        return ConfigError(f"{self._path}: {self._kind}.{name} is {str(value)[:40]}.")


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What Llama 3.1 divides each frequency of its rotation by, [head_dim / 2].

    Wavelengths under original / high stay, those over original / low are divided by the factor,
    and between them the two are blended (Llama 3.1's reference code, `apply_scaling`).
    """
    low, high, length = _LLAMA3.values()
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)
