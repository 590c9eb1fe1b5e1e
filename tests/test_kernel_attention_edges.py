"""Block attention held to one rounding, and at the ends of what it takes."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    same_bits,
    within_rounding,
)
from kernel_trees import random_tree

from dflash_mlx.kernels.block_attention import CHUNK, MOST_NODES, BlockAttention, TreeMask
from dflash_mlx.kernels.weights import AffineWeights

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def kernel() -> BlockAttention:
    return BlockAttention(kernel_factory())


def inputs(
    dtype: mx.Dtype,
    heads: tuple[int, int],
    nodes: int,
    length: int,
    head_dim: int = 64,
    quantized: tuple[int, int] | None = None,
) -> list[Any]:
    """Random queries, keys and values. heads: of queries and keys; quantized: bits and group."""
    mx.random.seed(length + nodes)
    queries = mx.random.normal((1, heads[0], nodes, head_dim)).astype(dtype)
    stored = [mx.random.normal((1, heads[1], length, head_dim)).astype(dtype) for _ in range(2)]
    if quantized:
        bits, group = quantized
        stored = [AffineWeights(*mx.quantize(x, group, bits), bits, group) for x in stored]
    return [queries, *stored]


def truth(queries: Any, keys: Any, values: Any, **named: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64 [1, H, N, D], and how large what is added up for each element is.

    Keys and values are rounded to the queries' dtype first, as a quantized cache's are.
    """
    dtype = queries.dtype
    q, k, v = (
        float64(mx.array(float64(x), mx.float32).astype(dtype))[0] for x in (queries, keys, values)
    )
    (heads, nodes, _), length = q.shape, k.shape[1]
    k, v = (x.repeat(heads // len(k), axis=0) for x in (k, v))
    past, tree = length - nodes, named.get("tree")
    ancestors = np.tri(nodes, dtype=bool) if tree is None else np.array(tree.ancestors)
    depths = np.arange(nodes) if tree is None else np.array(tree.positions) - named["first"] - past
    at = np.concatenate([np.arange(past), past + depths])
    back = at[past:, None] - at
    seen = np.concatenate([np.ones((nodes, past), bool), ancestors], axis=1)
    seen &= back < (named.get("window") or 2**30)
    scores = np.where(seen, q @ k.swapaxes(1, 2) * named["scale"], -np.inf)
    size = np.abs(q) @ np.abs(k).swapaxes(1, 2) * named["scale"]  # an error of exp's argument
    if named.get("sinks") is not None:
        sinks = float64(named["sinks"])[:, None, None].repeat(nodes, axis=1)
        scores = np.concatenate([scores, sinks], axis=2)
        size, v = (
            np.concatenate([x, 0 * x[:, :, :1] if x is size else 0 * x[:, :1]], 2 - (x is v))
            for x in (size, v)
        )
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    return (weights @ v)[None], ((weights * (4 + 2 * np.where(weights > 0, size, 0))) @ np.abs(v))[
        None
    ]


def check(kernel: BlockAttention, args: list[Any], **named: Any) -> mx.array:
    """The kernel's result, after holding it to one rounding."""
    y = kernel(*args, **named)
    expected, magnitude = truth(*args, **{"first": 0, **named})
    assert y.dtype == args[0].dtype and y.shape == args[0].shape
    assert within_rounding(y, expected, magnitude), named
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [None, (8, 32), (4, 32), (4, 64)])
@pytest.mark.parametrize("tree", [False, True])
def test_one_rounding(kernel, dtype, quantized, tree):
    """Weights are not rounded, nor what chunks add up to; groups of 32 lie twice in a head."""
    args, named = inputs(dtype, (6, 2), 9, 600, quantized=quantized), {"scale": 0.125, "first": 5}
    if tree:
        depths, ancestors = random_tree(9)
        named["tree"] = TreeMask(5 + 591 + depths, ancestors)
    check(kernel, args, **named)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_scores_far_from_zero(kernel, dtype, size):
    """Plus or minus 1e5, over two chunks: the largest decide, wherever they are."""
    queries, keys, values = inputs(dtype, (2, 1), 3, 530)
    queries = mx.zeros_like(queries)
    queries[..., 0] = 100.0
    places = mx.arange(530)
    keys = mx.zeros_like(keys)
    # Neighbours differ by 8 once scaled, so the largest has nearly all of the weight.
    keys[..., 0] = (size / 1e5 * (100.0 + 0.5 * (places % 7)))[None, None]
    y = kernel(queries, keys, values, scale=10.0)
    expected, _ = truth(queries, keys, values, scale=10.0, first=0)
    assert mx.isfinite(y).all().item()
    assert np.abs(float64(y) - expected).max() <= 2.0**-7 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first,length", [(0, 1600), (700, 1100), (0, 512 * 3), (511, 2)])
@pytest.mark.parametrize("level", [-20.0, 20.0])
def test_sinks_over_several_chunks(kernel, dtype, first, length, level):
    """A sink counts once, however many chunks there are, whether it or a key is the largest."""
    args = inputs(dtype, (4, 2), min(3, length), length)
    sinks = (mx.array([0.1, 1.3, -1.7, 2.2]) + level).astype(dtype)
    check(kernel, args, scale=0.125, first=first, sinks=sinks)


@pytest.mark.parametrize("window", [513, 1024, 1500])
@pytest.mark.parametrize("tree", [False, True])
def test_windows_longer_than_a_chunk(kernel, window, tree):
    """Which end in any chunk and tile, from a first row that lies in any."""
    named: dict[str, Any] = {"scale": 0.125, "window": window, "first": 777}
    args = inputs(mx.float32, (2, 1), 6, 1800)
    if tree:
        depths, ancestors = random_tree(6, seed=2)
        named["tree"] = TreeMask(777 + 1794 + depths, ancestors)
    check(kernel, args, **named)


def test_a_first_row_behind_thousands_of_keys(kernel):
    """A cache from row 3,001 on with 2,100 keys: four chunks and a half."""
    for first in (3001, 4096, 4095):
        check(kernel, inputs(mx.float16, (4, 1), 5, 2100), scale=0.125, first=first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,nodes", [((12, 1), 24), ((6, 1), MOST_NODES), ((16, 2), 33)])
def test_more_query_rows_than_a_threadgroup_takes(kernel, dtype, heads, nodes):
    """Of a head of keys, 264 to 384: several tiles, the last one in part."""
    args = inputs(dtype, heads, nodes, 90)
    y = check(kernel, args, scale=0.125, first=480)
    row = kernel(
        args[0][:, :, :1], *(x[:, :, : 90 - nodes + 1] for x in args[1:]), scale=0.125, first=480
    )
    assert same_bits(row[:, :, 0], y[:, :, 0])


@pytest.mark.parametrize("head_dim", [80, 96, 128, 192, 256])
def test_every_head_size_with_many_rows(kernel, head_dim):
    """A tile of keys holds fewer the longer they are, a threadgroup fewer rows."""
    for dtype in (mx.bfloat16, mx.float32):
        args = inputs(dtype, (5, 1), 40, 70, head_dim)
        check(kernel, args, scale=head_dim**-0.5, first=CHUNK - 20)


@pytest.mark.parametrize("nodes", [1, 7, 16, 63])
def test_trees_across_the_end_of_a_chunk(kernel, nodes):
    """One that begins before a chunk's end, at it, and after, behind chunks it has not reached."""
    for past in (CHUNK - 3, CHUNK - 1, CHUNK) if nodes < 63 else (2 * CHUNK - 2,):
        args = inputs(mx.float32, (3, 1), nodes, past + nodes)
        depths, ancestors = random_tree(nodes, seed=nodes)
        check(kernel, args, scale=0.125, tree=TreeMask(past + depths, ancestors))


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("which,bad", [(1, mx.nan), (2, mx.nan), (2, -mx.inf)])
def test_a_bad_key_or_value_spoils_only_rows_that_see_it(kernel, dtype, which, bad):
    """One of the draft, which earlier rows do not see, and one that a window leaves behind."""
    past, nodes, named = 508, 9, {"scale": 0.125, "window": 20}
    args = inputs(dtype, (4, 2), nodes, past + nodes)
    depths, ancestors = random_tree(nodes)
    for tree in (None, TreeMask(past + depths, ancestors)):
        seen = np.tri(nodes, dtype=bool) if tree is None else np.array(ancestors)
        positions = np.arange(nodes) if tree is None else np.array(depths)
        good = kernel(*args, **named, first=0, tree=tree)
        for row, spoilt in ((past - 18, positions < 2), (past + 4, seen[:, 4])):
            changed = [mx.array(x) for x in args]
            changed[which][0, 1, row, 3] = bad
            y = kernel(*changed, **named, first=0, tree=tree)
            hit, others = (mx.array(np.nonzero(x)[0]) for x in (spoilt, ~spoilt))
            assert hit.size and others.size
            assert same_bits(y[:, :2], good[:, :2])  # of the other head of keys
            assert same_bits(y[:, 2:, others], good[:, 2:, others])
            assert not mx.isfinite(y[:, 2:, hit]).any().item()
