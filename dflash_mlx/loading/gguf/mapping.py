"""A GGUF file's metadata and tensors as mlx-lm's config.json and weights.

The keys are those of github.com/ggml-org/ggml, docs/gguf.md; the fields are those of mlx-lm's
`ModelArgs`. A key that would change the arithmetic and has no field is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import ConfigError, WeightsError
from .header import READABLE, Tensor

# Architecture -> transformers' class. llama.cpp's converter permutes the rows of q and k for Llama
# only, whose rotation then pairs neighbours; Qwen's pairs halves, as mlx-lm does.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PERMUTED = "llama"
# Keys of an architecture that are read or do not matter; any other is refused.
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.finetuned", "attention.causal"),
}
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
# Bits of a weight in MLX's affine form, in groups of 32.
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
GROUP = 32
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
        names: its tensors' names, which show biases and a tied head.
        vocab_size: rows of its embedding.
        rope_divisors: its rope_freqs, [head_dim / 2], which divide the rotation's frequencies.

    Raises `ConfigError` for another architecture, or a field that is missing or unknown.
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
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
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


class _Fields:
    """The metadata of one architecture, each value checked as it is read."""

    def __init__(self, path: object, kind: str, metadata: Mapping[str, Any]) -> None:
        self._path, self._kind, self._metadata = path, kind, metadata

    def check_known(self) -> None:
        """Raise `ConfigError` for a key that may change what the model computes."""
        prefix = f"{self._kind}."
        for key, value in self._metadata.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in _KNOWN and value:
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
        """The scaling of Llama 3.1 and later; a GGUF file stores only the divisors."""
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
    """The divisors of Llama 3.1's rotation frequencies, [head_dim / 2].

    Wavelengths below original / high keep their frequency, those above original / low are divided
    by the factor, and those between are blended (Llama 3.1's reference code, `apply_scaling`).
    """
    low, high, length = _LLAMA3.values()
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((length / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def mlx_name(name: str) -> str | None:
    """mlx-lm's name of a GGUF tensor; None for an unknown one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_WHOLE[part]}.{kind}" if part in _WHOLE else None
    return f"model.layers.{int(layer)}.{_PARTS[part]}.{kind}" if part in _PARTS else None


def check_tensors(path: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` for an unknown tensor or a type that MLX does not read."""
    for name, tensor in tensors.items():
        if name != ROPE_DIVISORS and mlx_name(name) is None:
            raise ConfigError(f"{path}: the tensor {name} is not understood.")
        if tensor.type not in READABLE:
            raise ConfigError(
                f"{path}: {name} is stored as {tensor.type}; of GGUF's types, "
                f"{', '.join(READABLE)} are read: quantize it to one of these."
            )
    if "token_embd.weight" not in tensors:
        raise WeightsError(f"{path}: the tensor token_embd.weight is missing.")


def quantization(tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """The config's `quantization`; None if all tensors are floats.

    The commonest width is the default; layers of another width get an entry.
    """
    bits = {
        str(mlx_name(name)).removesuffix(".weight"): _BITS[tensor.type]
        for name, tensor in tensors.items()
        if tensor.type in _BITS
    }
    if not bits:
        return None
    usual = max(sorted(set(bits.values())), key=[*bits.values()].count)
    others = {
        layer: {"group_size": GROUP, "bits": width}
        for layer, width in bits.items()
        if width != usual
    }
    return {"group_size": GROUP, "bits": usual, **others}


def convert(
    names: Iterable[str],
    arrays: Mapping[str, mx.array],
    tensors: Mapping[str, Tensor],
    unpack: bool,
    heads: Mapping[str, int],
) -> dict[str, mx.array]:
    """Some tensors of a file under mlx-lm's names.

    Args:
        names: which, by their names in the file.
        arrays: the file as `mx.load` reads it: a quantized "x.weight" comes with "x.scales" and
            "x.biases", affine in groups of 32.
        tensors: their types and places, by name.
        unpack: convert quantized and half-precision weights to float32.
        heads: for "attn_q" and "attn_k", the heads whose rows are permuted; empty where none are.
    """
    result = {}
    for name in names:
        stem, kind = name.rsplit(".", 1)
        parts = {kind: arrays[name]}
        if bits := _BITS.get(tensors[name].type):
            packed = [arrays[f"{stem}.{part}"] for part in ("scales", "biases")]
            if unpack:
                scales, biases = (part.astype(mx.float32) for part in packed)
                parts = {kind: mx.dequantize(arrays[name], scales, biases, GROUP, bits)}
            else:
                parts |= dict(zip(("scales", "biases"), packed, strict=True))
        count = heads.get(stem.rpartition(".")[2])
        for part, array in parts.items():
            if count:
                array = by_halves(array, count)
            if unpack:
                array = array.astype(mx.float32)
            result[str(mlx_name(name)).removesuffix(kind) + part] = array
    return result


def by_halves(array: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's permutation of the rows [heads * head_dim, ...] of q and k.

    Its converter puts row i of a head's second half behind row i of the first. Whole rows move, so
    packed weights and their scales move alike.
    """
    rows, *rest = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(rows, *rest)
