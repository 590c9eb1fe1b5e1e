"""GGML's blocks as floats, or as weights of MLX in the same bits, through the gguf package.

MLX's affine weights are codes x scale + bias in groups of 32. Blocks of Q4_0, Q4_1, Q5_0, Q5_1 and
Q8_0 have just that in half precision, so nothing is rounded. The scale of a group of Q4_K or Q5_K
is the product of its block's scale and a number of its own. The product and the bias are rounded to
half precision, as the weights would be if they were unpacked. MXFP4 is MLX's mxfp4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

GROUP = 32
_AT_ONCE = 1 << 18  # weights that are unpacked at once, so that temporaries stay in the cache
_FLOATS = (Type.F32, Type.F16, Type.BF16)
# The beginning of a block with scale 1 and minimum 0: such a block dequantizes to its codes.
_ONE = np.float16(1).tobytes()
# In Q4_K and Q5_K, also 8 scales of 1 and 8 minimums of 0, of 6 bits each.
_K_HEAD = _ONE + bytes(2) + b"\1" * 4 + bytes(4) + b"\1" * 4


class Packing(NamedTuple):
    """How a type becomes weights of MLX.

    Attributes:
        bits: the bits of a code.
        head: the bytes of a block before its codes, for codes that are not scaled.
        zero: the code of 0, where the file has no minimum.
        mode: MLX's mode of quantization.
    """

    bits: int
    head: bytes = _ONE
    zero: int = 0
    mode: str = "affine"


PACKINGS = {
    Type.Q4_0: Packing(4, zero=8),
    Type.Q4_1: Packing(4, _ONE + bytes(2)),
    Type.Q5_0: Packing(5, zero=16),
    Type.Q5_1: Packing(5, _ONE + bytes(2)),
    Type.Q8_0: Packing(8, zero=128),
    Type.Q4_K: Packing(4, _K_HEAD),
    Type.Q5_K: Packing(5, _K_HEAD),
    Type.MXFP4: Packing(4, mode="mxfp4"),
}


def is_readable(kind: Type) -> bool:
    """Whether weights of a type can be unpacked."""
    return kind in _FLOATS or hasattr(quants, kind.name)


def unpack(blocks: np.ndarray, kind: Type) -> np.ndarray:
    """Blocks [count, bytes] as float32 [count * weights]."""
    weights = GGML_QUANT_SIZES[kind][0]
    values = np.empty((len(blocks), weights), np.float32)
    step = max(1, _AT_ONCE // weights)
    for start in range(0, len(blocks), step):
        part = np.ascontiguousarray(blocks[start : start + step]).reshape(1, -1)
        values[start : start + step] = quants.dequantize(part, kind).reshape(-1, weights)
    return values.reshape(-1)


def pack(blocks: np.ndarray, kind: Type) -> dict[str, np.ndarray]:
    """Blocks of a type of `PACKINGS` as MLX's parts of a quantized weight, without their shape.

    Args:
        blocks: [count, bytes] uint8.

    Returns: "weight" uint32, and "scales" and "biases" in half precision; of MXFP4 "weight" and
        "scales" uint8.
    """
    bits, head, zero, mode = PACKINGS[kind]
    packed_codes = np.empty((len(blocks), GGML_QUANT_SIZES[kind][0] * bits // 8), np.uint8)
    step = _AT_ONCE // GGML_QUANT_SIZES[kind][0]
    for start in range(0, len(blocks), step):
        part = np.array(blocks[start : start + step])
        if mode == "affine":
            part[:, : len(head)] = np.frombuffer(head, np.uint8)
            codes = (unpack(part, kind) + zero).astype(np.uint8)
        else:  # after the scale, byte i has code i in its low bits and code i + 16 in the others
            codes = np.stack([part[:, 1:] & 15, part[:, 1:] >> 4], axis=1)
        code_bits = np.unpackbits(codes.reshape(-1, 1), axis=1, count=bits, bitorder="little")
        packed = np.packbits(code_bits.reshape(len(part), -1), axis=1, bitorder="little")
        packed_codes[start : start + step] = packed
    weight = packed_codes.reshape(-1).view(np.uint32)
    if mode != "affine":
        return {"weight": weight, "scales": np.array(blocks[:, 0])}
    scales, biases = _scales(blocks[:, : len(head)], kind, zero)
    return {"weight": weight, "scales": scales, "biases": biases}


def _scales(heads: np.ndarray, kind: Type, zero: int) -> tuple[np.ndarray, np.ndarray]:
    """The scales and biases of all groups, in half precision."""
    scale = np.ascontiguousarray(heads[:, :2]).view(np.float16)
    if heads.shape[1] < 4:  # only a scale
        return scale.reshape(-1), (-zero * scale).reshape(-1)
    bias = np.ascontiguousarray(heads[:, 2:4]).view(np.float16)
    if kind in (Type.Q4_K, Type.Q5_K):
        group_scale, group_minimum = quants.Q4_K.get_scale_min(np.ascontiguousarray(heads[:, 4:]))
        scale = scale.astype(np.float32) * group_scale
        bias = -bias.astype(np.float32) * group_minimum
    return scale.astype(np.float16).reshape(-1), bias.astype(np.float16).reshape(-1)
