"""Cases of block attention, and softmax attention in numpy to compare its results with."""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from kernel_check import float64, random_tree, within_rounding

from dflash_mlx.kernels.block_attention import (
    AttentionCall,
    BlockAttention,
    TreeMask,
    block_attention_reference,
)
from dflash_mlx.kernels.weights import AffineWeights


def attention_of(kernel: BlockAttention):
    """The kernel called with the arguments of `AttentionCall`."""
    return lambda *args, **named: kernel(AttentionCall(*args, **named))


def reference(*args: Any, **named: Any) -> mx.array:
    """The package's reference, called with the arguments of `AttentionCall`."""
    return block_attention_reference(AttentionCall(*args, **named))


def inputs(
    dtype: mx.Dtype,
    heads: tuple[int, int],
    nodes: int,
    length: int,
    head_dim: int = 64,
    quantized: tuple[int, int] | None = None,
) -> list[Any]:
    """Random queries, keys and values.

    heads: the number of query heads and of key heads; quantized: bits and group size of keys.
    """
    mx.random.seed(length + nodes)
    query_heads, key_heads = heads
    queries = mx.random.normal((1, query_heads, nodes, head_dim)).astype(dtype)
    keys = mx.random.normal((1, key_heads, length, head_dim)).astype(dtype)
    values = mx.random.normal((1, key_heads, length, head_dim)).astype(dtype)
    if quantized:
        bits, group = quantized
        keys = AffineWeights(*mx.quantize(keys, group, bits), bits, group)
        values = AffineWeights(*mx.quantize(values, group, bits), bits, group)
    return [queries, keys, values]


@dataclass(frozen=True)
class Case:
    """One call of block attention: `nodes` rows, the last of the `length` rows of a cache."""

    dtype: mx.Dtype = mx.float32
    head_dim: int = 64
    key_heads: int = 1
    group: int = 1  # query heads for each head of keys
    nodes: int = 1
    length: int = 40
    first: int = 0  # the position of the cache's first row
    window: int | None = None
    sinks: bool = False
    bits: int | None = None
    bits_group: int = 64
    tree: bool = False

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Random positional arguments of block attention, and its keyword arguments."""
        heads = self.key_heads * self.group
        args = inputs(
            self.dtype,
            heads=(heads, self.key_heads),
            nodes=self.nodes,
            length=self.length,
            head_dim=self.head_dim,
            quantized=(self.bits, self.bits_group) if self.bits else None,
        )
        named = {"scale": self.head_dim**-0.5, "first": self.first, "window": self.window}
        if self.sinks:
            named["sinks"] = mx.random.normal((heads,)).astype(self.dtype)
        if self.tree:
            depths, ancestors = random_tree(self.nodes)
            mask = mx.pad(ancestors, ((0, 0), (3, 0)))[:, 3:]  # a slice, as it is in a forward
            root = self.first + self.length - self.nodes
            named["tree"] = TreeMask(root + depths, mask)
        return args, named


def truth(queries: Any, keys: Any, values: Any, **named: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64 [1, H, N, D], and the magnitude of the terms summed for each element.

    Keys and values are rounded to the queries' dtype first, as a quantized cache's are.
    """

    def rounded(array: Any) -> np.ndarray:
        return float64(mx.array(float64(array), mx.float32).astype(queries.dtype))[0]

    q = rounded(queries)
    heads, nodes, _ = q.shape
    group = heads // rounded(keys).shape[0]
    k = rounded(keys).repeat(group, axis=0)
    v = rounded(values).repeat(group, axis=0)
    past = k.shape[1] - nodes
    tree = named.get("tree")
    if tree is None:
        ancestors = np.tri(nodes, dtype=bool)
        depths = np.arange(nodes)
    else:
        ancestors = np.array(tree.ancestors)
        depths = np.array(tree.positions) - named["first"] - past
    positions = np.concatenate([np.arange(past), past + depths])
    distances = positions[past:, None] - positions
    visible = np.concatenate([np.ones((nodes, past), bool), ancestors], axis=1)
    visible &= distances < (named.get("window") or 2**30)
    scores = np.where(visible, q @ k.swapaxes(1, 2) * named["scale"], -np.inf)
    magnitude = np.abs(q) @ np.abs(k).swapaxes(1, 2) * named["scale"]  # of exp's argument
    if named.get("sinks") is not None:  # a further column of scores, whose value is 0
        sinks = float64(named["sinks"])[:, None, None].repeat(nodes, axis=1)
        scores = np.concatenate([scores, sinks], axis=2)
        magnitude = np.concatenate([magnitude, np.zeros_like(sinks)], axis=2)
        v = np.concatenate([v, np.zeros_like(v[:, :1])], axis=1)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    # An error of exp's argument becomes a relative error of the weight.
    weight_errors = weights * (4 + 2 * np.where(weights > 0, magnitude, 0))
    return (weights @ v)[None], (weight_errors @ np.abs(v))[None]


def check(kernel, args: list[Any], **named: Any) -> mx.array:
    """The kernel's result, asserted to be within one rounding of numpy's."""
    y = kernel(*args, **named)
    expected, magnitude = truth(*args, **{"first": 0, **named})
    assert y.dtype == args[0].dtype and y.shape == args[0].shape
    assert within_rounding(y, expected, magnitude), named
    return y


def with_room(rows: Any, room: int) -> Any:
    """Keys or values with `room` more rows after them, which hold NaN."""
    if isinstance(rows, AffineWeights):
        parts = (with_room(part, room) for part in (rows.words, rows.scales, rows.biases))
        return AffineWeights(*parts, rows.bits, rows.group_size)
    fill = 1 if rows.dtype == mx.uint32 else math.nan
    more = mx.full((*rows.shape[:2], room, rows.shape[3]), fill, rows.dtype)
    return mx.concatenate([rows, more], axis=2)


def first_rows(stored: Any, length: int) -> Any:
    """The first `length` rows of keys or values."""
    if not isinstance(stored, AffineWeights):
        return stored[:, :, :length]
    arrays = (x[:, :, :length] for x in (stored.words, stored.scales, stored.biases))
    return AffineWeights(*arrays, stored.bits, stored.group_size)
