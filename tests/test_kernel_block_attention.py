"""Block attention on the emulated device, against softmax written out in numpy."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    TOLERANCES,
    kernel_factory,
    on_gpu_or_emulator,
    relative_error,
    same_bits,
)
from kernel_trees import random_tree
from mlx_lm.models.cache import KVCache

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.block_attention import BlockAttention, TreeMask, block_attention_reference
from dflash_mlx.kernels.weights import AffineWeights, dequantized

pytestmark = on_gpu_or_emulator


@dataclass(frozen=True)
class Case:
    """One call. Unless told otherwise: a chain of the last rows of a cache from position 0."""

    dtype: mx.Dtype = mx.float32
    head_dim: int = 64
    key_heads: int = 1
    group: int = 1  # query heads for each of them
    nodes: int = 1
    length: int = 40
    first: int = 0
    window: int | None = None
    sinks: bool = False
    bits: int | None = None
    tree: bool = False

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Random arguments of `block_attention`: what it takes by place, and by name."""
        mx.random.seed(self.length)
        heads, stored = self.key_heads * self.group, (1, self.key_heads, self.length, self.head_dim)
        queries = mx.random.normal((1, heads, self.nodes, self.head_dim)).astype(self.dtype)
        pair = [mx.random.normal(stored).astype(self.dtype) for _ in range(2)]
        if self.bits:
            pair = [AffineWeights(*mx.quantize(x, 64, self.bits), self.bits, 64) for x in pair]
        named = {"scale": self.head_dim**-0.5, "first": self.first, "window": self.window}
        if self.sinks:
            named["sinks"] = mx.random.normal((heads,)).astype(self.dtype)
        if self.tree:
            depths, ancestors = random_tree(self.nodes)
            named["tree"] = TreeMask(self.first + self.length - self.nodes + depths, ancestors)
        return [queries, *pair], named


# Every dtype, head size, group, cache, mask and length meets most of the others once.
CASES = [
    Case(length=1),
    Case(mx.float16, 64, nodes=2, length=2, bits=8),
    Case(mx.bfloat16, 64, group=2, nodes=16, length=16, sinks=True),
    Case(mx.float16, 64, key_heads=2, group=8, nodes=3, length=600, window=128, sinks=True),
    Case(mx.float16, 80, key_heads=2, group=3, nodes=16, length=300),
    Case(mx.float32, 96, group=7, nodes=5, length=270, first=1000, window=256),
    Case(mx.bfloat16, 96, key_heads=3, nodes=33, length=140, tree=True, window=12),
    Case(mx.bfloat16, 128, group=5, nodes=8, length=700, first=250, sinks=True),
    Case(mx.float16, 128, group=4, nodes=16, length=600, bits=8),
    Case(mx.float32, 128, group=6, nodes=2, length=513),
    Case(mx.bfloat16, 128, key_heads=2, group=2, nodes=12, length=515, tree=True, bits=4),
    Case(mx.float16, 192, nodes=15, length=512, bits=8),
    Case(mx.float32, 192, key_heads=2, nodes=4, length=100, window=1),
    Case(mx.float16, 256, group=2, nodes=64, length=320, tree=True),
    Case(mx.float32, 256, key_heads=2, group=8, nodes=6, length=270, first=300, bits=8),
    Case(mx.bfloat16, 256, group=3, nodes=7, length=60, window=20),
    Case(mx.float32, nodes=64, length=500, first=90, tree=True, window=200, sinks=True),
    Case(mx.float32, nodes=4, length=5000),
    Case(mx.float32, 256, group=70, nodes=3, length=20, tree=True),
]


@pytest.fixture(scope="module")
def kernel() -> BlockAttention:
    return BlockAttention(kernel_factory())


def softmax_attention(queries: Any, keys: Any, values: Any, **named: Any) -> mx.array:
    """Attention [1, H, N, D] in float64, one query at a time, each seeing a list of rows."""
    queries, keys, values = (np.array(dequantized(x), float)[0] for x in (queries, keys, values))
    (heads, nodes, _), length = queries.shape, keys.shape[1]
    past, tree, window = length - nodes, named.get("tree"), named["window"] or length + nodes
    outputs = np.zeros(queries.shape)
    for node in range(nodes):
        path = np.nonzero(np.array(tree.ancestors)[node])[0] if tree else range(node + 1)
        rows = np.array([*range(past), *(past + np.array(path))])[-window:]
        for head in range(heads):
            shared = head // (heads // len(keys))
            scores = keys[shared, rows] @ queries[head, node] * named["scale"]
            if "sinks" in named:
                scores = np.append(scores, named["sinks"][head].item())
            weights = np.exp(scores - scores.max())
            weights = weights[: len(rows)] / weights.sum()
            outputs[head, node] = weights @ values[shared, rows]
    return mx.array(outputs[None], mx.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_and_reference_are_softmax_attention(case, kernel):
    args, named = case.arguments()
    expected = softmax_attention(*args, **named)
    reference = block_attention_reference(*map(dequantized, args), **named)
    assert relative_error(reference, expected) < TOLERANCES[mx.float32]
    result = kernel(*args, **named)
    assert result.dtype == case.dtype
    assert relative_error(result, expected) < TOLERANCES[case.dtype]


@pytest.mark.parametrize("tree", [False, True])
def test_a_window_ends_where_it_ends(tree, kernel):
    """Wherever that is in a tile of keys."""
    case = Case(nodes=3, length=70, first=500, tree=tree)
    args, named = case.arguments()
    for window in range(1, 40):
        expected = softmax_attention(*args, **named | {"window": window})
        result = kernel(*args, **named | {"window": window})
        assert relative_error(result, expected) < TOLERANCES[mx.float32], window


# In float32: half precision would round most differences away.
ALONE = [
    Case(head_dim=96, group=4, nodes=16, length=520, sinks=True),
    Case(head_dim=64, key_heads=2, group=3, nodes=16, length=262, first=260, window=100),
    Case(head_dim=256, nodes=16, length=70, first=450, bits=8),
    Case(mx.bfloat16, 128, key_heads=2, group=2, nodes=16, length=100),
]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_row_has_the_same_bits_whatever_shares_the_call(case, kernel):
    """Rows that came later are neither asked nor in the cache, as in plain decoding."""
    (queries, *stored), named = case.arguments()
    block = kernel(queries, *stored, **named)
    for rows in range(1, case.nodes):
        known = [cut(x, case.length - case.nodes + rows) for x in stored]
        first, last = queries[:, :, :rows], queries[:, :, rows - 1 : rows]
        assert same_bits(kernel(first, *known, **named), block[:, :, :rows])
        assert same_bits(kernel(last, *known, **named), block[:, :, rows - 1 : rows])


def cut(stored: Any, length: int) -> Any:
    """The first rows of keys or values."""
    if not isinstance(stored, AffineWeights):
        return stored[:, :, :length]
    arrays = (x[:, :, :length] for x in (stored.words, stored.scales, stored.biases))
    return AffineWeights(*arrays, stored.bits, stored.group_size)


def test_rows_that_a_sliding_cache_has_dropped_change_no_bits(kernel):
    """A verify keeps more of them than a step of one row does."""
    case = Case(group=3, nodes=3, length=190, first=400, window=60)
    (queries, keys, values), named = case.arguments()
    whole = kernel(queries, keys, values, **named)
    for dropped in (1, 100, 190 - 62):
        rest = (x[:, :, dropped:] for x in (keys, values))
        assert same_bits(kernel(queries, *rest, **named | {"first": 400 + dropped}), whole)


@pytest.mark.parametrize("past", [0, 200, 250, 256])
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(past, kernel):
    """Siblings between a node and its ancestors move nothing, around the edge of a chunk."""
    case = Case(group=3, nodes=24, length=past + 24, first=259, window=190, tree=True)
    (queries, keys, values), named = case.arguments()
    block = kernel(queries, keys, values, **named)
    ancestors = np.array(named.pop("tree").ancestors)
    for node in (0, 1, 12, 23):
        path = mx.array(np.nonzero(ancestors[node])[0])
        rows = mx.concatenate([mx.arange(past), past + path])
        stored = (mx.take(x, rows, axis=2) for x in (keys, values))
        chain = kernel(mx.take(queries, path, axis=2), *stored, **named)
        assert same_bits(chain[:, :, -1], block[:, :, node])


def test_a_cache_is_read_in_place(kernel):
    """A cache has room for more rows than it holds: its keys are slices, not whole arrays."""
    case = Case(mx.float16, key_heads=3, group=2, nodes=5, length=35)
    (queries, keys, values), named = case.arguments()
    expected = kernel(queries, keys, values, **named)
    slices = KVCache().update_and_fetch(keys, values)
    assert same_bits(kernel(queries, *slices, **named), expected)
    turned = (mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (keys, values))
    assert same_bits(kernel(queries, *turned, **named), expected)


def test_what_does_not_fit_is_refused(kernel):
    (queries, keys, values), named = Case(mx.float16, nodes=3, length=8).arguments()
    tree = TreeMask(mx.zeros(2), mx.zeros((2, 2)))
    eight, four = (AffineWeights(*mx.quantize(keys, 64, bits), bits, 64) for bits in (8, 4))
    for args, extra in [
        ((mx.zeros((1, 1, 65, 64)), keys, values), {}),
        ([mx.zeros((*x.shape[:3], 72)) for x in (queries, keys, values)], {}),
        ((queries, keys, values[:, :, 1:]), {}),
        ((queries, keys[:, :, :2], values[:, :, :2]), {}),
        ((queries, keys, values.astype(mx.float32)), {}),
        ((queries, eight, four), {}),
        ((queries, keys, values), {"sinks": mx.zeros(3)}),
        ((queries, keys, values), {"tree": tree}),
    ]:
        for attention in (kernel, block_attention_reference):
            with pytest.raises(KernelError, match="Block attention has no kernel"):
                attention(*args, **named | extra)
