"""The tensors of a GGUF file, by mlx-lm's names and in mlx-lm's order of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from ...errors import ConfigError, WeightsError
from .header import READABLE, Tensor

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


def mlx_name(name: str) -> str | None:
    """mlx-lm's name of a GGUF tensor; None for one that none of the architectures has."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_WHOLE[part]}.{kind}" if part in _WHOLE else None
    return f"model.layers.{int(layer)}.{_PARTS[part]}.{kind}" if part in _PARTS else None


def check_tensors(path: object, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` for tensors that have no name here, or a type that MLX does not read."""
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
    """mlx-lm's `quantization` of a model whose matrices stay in their bits; None if all are float.

    The commonest width is the model's; matrices of another one are named.
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


def converted_bytes(tensors: Mapping[str, Tensor], unpack: bool) -> int:
    """The bytes of all tensors as `convert` gives them."""
    total = 0
    for tensor in tensors.values():
        weights = math.prod(tensor.shape)
        if unpack:
            total += 4 * weights
        elif bits := _BITS.get(tensor.type):
            total += weights * bits // 8 + 4 * weights // GROUP  # a scale and a bias, half each
        else:
            total += tensor.size
    return total


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
        tensors: the file's own account of them.
        unpack: make float32 of all that is quantized or in half precision.
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
    """Rows [heads * head_dim, ...] of a rotation by neighbours, in the order of one by halves.

    llama.cpp's converter wrote row i of a half and row i of the other side by side; this puts them
    back. It moves whole rows, so packed weights and their scales move alike.
    """
    rows, *rest = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(rows, *rest)
