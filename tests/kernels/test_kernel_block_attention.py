"""Block attention on the emulated device, held to one rounding of softmax written out in numpy."""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import (
    DTYPES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    random_tree,
    relative_error,
    same_bits,
    within_rounding,
)
from kernel_models import Recorder
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from dflash_mlx.errors import KernelError
from dflash_mlx.kernels.block_attention import (
    CHUNK,
    MOST_NODES,
    MOST_STEPS,
    AttentionCall,
    BlockAttention,
    TreeMask,
    block_attention_reference,
)
from dflash_mlx.kernels.weights import AffineWeights, dequantized

pytestmark = on_gpu_or_emulator


def attention_of(kernel: BlockAttention):
    """The kernel called with the arguments of `AttentionCall`."""
    return lambda *args, **named: kernel(AttentionCall(*args, **named))


def reference(*args: Any, **named: Any) -> mx.array:
    return block_attention_reference(AttentionCall(*args, **named))


@pytest.fixture(scope="module")
def kernel():
    return attention_of(BlockAttention(kernel_factory()))


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
    bits_group: int = 64
    tree: bool = False

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Random arguments of `block_attention`: what it takes by place, and by name."""
        heads = self.key_heads * self.group
        quantized = self.bits and (self.bits, self.bits_group)
        shape = (heads, self.key_heads), self.nodes, self.length, self.head_dim
        args = inputs(self.dtype, *shape, quantized)
        named = {"scale": self.head_dim**-0.5, "first": self.first, "window": self.window}
        if self.sinks:
            named["sinks"] = mx.random.normal((heads,)).astype(self.dtype)
        if self.tree:
            depths, ancestors = random_tree(self.nodes)
            mask = mx.pad(ancestors, ((0, 0), (3, 0)))[:, 3:]  # a forward has a slice of its mask
            named["tree"] = TreeMask(self.first + self.length - self.nodes + depths, mask)
        return args, named


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
    # Groups of 32 lie twice in a head.
    Case(mx.bfloat16, key_heads=2, group=3, nodes=9, length=600, first=5, bits=8, bits_group=32),
    Case(mx.float32, key_heads=2, nodes=9, length=60, bits=4, bits_group=32, tree=True),
    # Windows that end in any chunk, sinks over four chunks, and a first row after thousands.
    Case(group=2, nodes=6, length=1800, first=777, window=1500),
    Case(group=2, nodes=6, length=1800, first=777, window=513, tree=True),
    Case(mx.float16, key_heads=2, group=2, nodes=3, length=1600, sinks=True),
    Case(mx.float16, group=4, nodes=5, length=2100, first=4095),
    # More query rows for a head of keys than a threadgroup takes, 264 to 384.
    Case(mx.bfloat16, group=12, nodes=24, length=90, first=480),
    Case(mx.float32, group=6, nodes=MOST_NODES, length=90, first=480),
    Case(mx.float16, 128, key_heads=2, group=8, nodes=33, length=90, first=480),
    Case(mx.bfloat16, 80, group=5, nodes=40, length=70, first=CHUNK - 20),
    Case(mx.float32, 192, group=5, nodes=40, length=70, first=CHUNK - 20),
    # Trees that begin before the end of a chunk, and at it.
    Case(group=3, nodes=16, length=CHUNK + 13, tree=True),
    Case(group=3, nodes=7, length=CHUNK + 7, tree=True),
    Case(group=3, nodes=63, length=2 * CHUNK + 61, tree=True),
]


def truth(queries: Any, keys: Any, values: Any, **named: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64 [1, H, N, D], and how large what is added up for each element is.

    Keys and values are rounded to the queries' dtype first, as a quantized cache's are.
    """
    dtype = queries.dtype
    q, k, v = (
        float64(mx.array(float64(x), mx.float32).astype(dtype))[0] for x in (queries, keys, values)
    )
    length = k.shape[1]
    (heads, nodes, _) = q.shape
    k, v = (x.repeat(heads // len(k), axis=0) for x in (k, v))
    past = length - nodes
    tree = named.get("tree")
    ancestors = np.tri(nodes, dtype=bool) if tree is None else np.array(tree.ancestors)
    depths = np.arange(nodes) if tree is None else np.array(tree.positions) - named["first"] - past
    positions = np.concatenate([np.arange(past), past + depths])
    back = positions[past:, None] - positions
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


def check(kernel, args: list[Any], **named: Any) -> mx.array:
    """The kernel's result, after holding it to one rounding."""
    y = kernel(*args, **named)
    expected, magnitude = truth(*args, **{"first": 0, **named})
    assert y.dtype == args[0].dtype and y.shape == args[0].shape
    assert within_rounding(y, expected, magnitude), named
    return y


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_and_reference_are_softmax_attention(case, kernel):
    args, named = case.arguments()
    check(kernel, args, **named)
    exact = [*map(dequantized, args)]
    expected = mx.array(truth(*exact, **named)[0], mx.float32)
    assert relative_error(reference(*exact, **named), expected) < 1e-5


PLACED = [case for case in CASES if not case.tree and (case.window or not case.first)]


@pytest.mark.parametrize("case", PLACED, ids=str)
def test_rows_behind_those_that_are_there_change_no_bit(case, kernel):
    """As in a trace, whose buffers have room: what is there is told by an array."""
    (queries, *stored), named = case.arguments()
    expected = kernel(queries, *stored, **named)
    place = mx.array([named.pop("first"), case.length], mx.int32)
    for room in (1, 300, 700):
        longer = [with_room(rows, room) for rows in stored]
        assert mx.array_equal(kernel(queries, *longer, **named, place=place), expected)
        result = reference(queries, *longer, **named, place=place)
        assert mx.array_equal(result, reference(queries, *stored, **named, first=int(place[0])))


def with_room(rows: Any, room: int) -> Any:
    """Keys or values with this many more rows of NaN after them."""
    if isinstance(rows, AffineWeights):
        parts = (with_room(part, room) for part in (rows.words, rows.scales, rows.biases))
        return AffineWeights(*parts, rows.bits, rows.group_size)
    fill = 1 if rows.dtype == mx.uint32 else math.nan
    more = mx.full((*rows.shape[:2], room, rows.shape[3]), fill, rows.dtype)
    return mx.concatenate([rows, more], axis=2)


@pytest.mark.parametrize("tree", [False, True])
def test_a_window_ends_where_it_ends(tree, kernel):
    """Wherever that is in a tile of keys."""
    case = Case(nodes=3, length=70, first=500, tree=tree)
    args, named = case.arguments()
    for window in range(1, 40):
        check(kernel, args, **named | {"window": window})


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
        stored_rows = [cut(x, case.length - case.nodes + rows) for x in stored]
        first = queries[:, :, :rows]
        last = queries[:, :, rows - 1 : rows]
        assert same_bits(kernel(first, *stored_rows, **named), block[:, :, :rows])
        assert same_bits(kernel(last, *stored_rows, **named), block[:, :, rows - 1 : rows])


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


def test_calls_of_one_shape_share_what_is_the_same_alone(kernel):
    """A prepared launch is not used where a number or an array of it is another."""
    args, plain = Case(nodes=9, length=40).arguments()
    variants: list[dict[str, Any]] = [{}, {"first": 490}, {"window": 9}, {"scale": 1.0}]
    variants += [{"sinks": mx.array([level])} for level in (0.0, 1.0)]
    for seed in range(2):
        depths, ancestors = random_tree(9, seed)
        variants.append({"tree": TreeMask(31 + depths, ancestors)})
    for changed in variants:
        alone = attention_of(BlockAttention(kernel_factory()))(*args, **plain | changed)
        assert same_bits(kernel(*args, **plain | changed), alone), changed


def test_a_long_answer_keeps_few_prepared_launches():
    kernel = BlockAttention(Recorder())
    (args, named) = Case(nodes=2).arguments()
    for first in range(3 * MOST_STEPS):
        kernel(AttentionCall(*args, **named | {"first": first}))
    assert len(kernel._known) <= MOST_STEPS


def test_queries_keys_and_values_may_lie_in_any_order(kernel):
    """Queries have their heads last where no rope copied them."""
    (queries, keys, values), named = Case(mx.float16, key_heads=3, nodes=5, length=35).arguments()
    expected = kernel(queries, keys, values, **named)
    turned = (mx.contiguous(x.swapaxes(2, 3)).swapaxes(2, 3) for x in (keys, values))
    assert same_bits(kernel(queries, *turned, **named), expected)
    heads_last = mx.contiguous(queries.swapaxes(1, 2)).swapaxes(1, 2)
    assert same_bits(kernel(heads_last, keys, values, **named), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_scores_far_from_zero(kernel, dtype, size):
    """Plus or minus 1e5, over two chunks: the largest decide, wherever they are."""
    queries, keys, values = inputs(dtype, heads=(2, 1), nodes=3, length=530)
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


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("which,bad", [(1, mx.nan), (2, mx.nan), (2, -mx.inf)])
def test_a_bad_key_or_value_spoils_only_rows_that_see_it(kernel, dtype, which, bad):
    """A key of the draft, which earlier rows do not see, and one that a window has passed."""
    past = 508
    nodes = 9
    named = {"scale": 0.125, "window": 20}
    args = inputs(dtype, heads=(4, 2), nodes=nodes, length=past + nodes)
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


def test_what_does_not_fit_is_refused(kernel):
    (queries, keys, values), named = Case(mx.float16, nodes=3, length=8).arguments()
    tree = TreeMask(mx.zeros(2), mx.zeros((2, 2)))
    eight, four = (AffineWeights(*mx.quantize(keys, 64, bits), bits, 64) for bits in (8, 4))
    for stored in (keys, eight):  # nor where part of it is that of an earlier call
        kernel(queries, stored, stored, **named)
    for args, extra in [
        ([mx.zeros((1, 1, 65, 64))] * 3, {}),
        ([mx.zeros((*x.shape[:3], 72)) for x in (queries, keys, values)], {}),
        ((queries, keys, values[:, :, 1:]), {}),
        ((queries, keys[:, :, :2], values[:, :, :2]), {}),
        ((queries, *(x.astype(mx.float32) for x in (keys, values))), {}),
        ((queries, eight, four), {}),
        ((queries, keys, values), {"sinks": mx.zeros(3)}),
        ((queries, keys, values), {"tree": tree}),
        ((queries, keys, values), {"tree": TreeMask(mx.zeros(3), tree.ancestors)}),
    ]:
        for attention in (kernel, reference):
            with pytest.raises(KernelError, match="Block attention has no kernel"):
                attention(*args, **named | extra)


@pytest.mark.parametrize("length", [17_000, 33_100, 66_100])
def test_long_contexts(length):
    """Up to more keys than a 16-bit index can count. The newest 500 have the largest weights."""
    quick = attention_of(BlockAttention(kernel_factory(checked=False)))
    mx.random.seed(length)
    q, k, v = (mx.random.normal((1, 1, n, 64)) for n in (2, length, length))
    k[:, :, -500:] *= 3
    window = length - 100
    y = quick(q, k, v, scale=0.125, window=window)
    assert relative_error(y, reference(q, k, v, scale=0.125, window=window)) < 1e-4
    tree = TreeMask(mx.array([length - 2, length - 1]), mx.array([[True, False], [True, True]]))
    y = quick(q, k, v, scale=0.125, tree=tree)
    assert relative_error(y, reference(q, k, v, scale=0.125)) < 1e-4


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_cache_is_read_where_it_lies(bits):
    """mlx-lm's caches have room for 256 rows: what they return is a slice of each head's."""
    copied: list[str] = []
    seen: list[mx.array] = []

    def factory(**definition):
        kernel = kernel_factory()(**definition)
        if definition.get("ensure_row_contiguous", True) and "keys" in definition["input_names"]:
            copied.append(definition["name"])

        def launch(inputs, **call):
            seen.extend(inputs)
            return kernel(inputs=inputs, **call)

        return launch

    cache = KVCache() if bits is None else QuantizedKVCache(group_size=32, bits=bits)
    mx.random.seed(4)
    q = mx.random.normal((1, 6, 4, 64))
    stored = cache.update_and_fetch(*(mx.random.normal((1, 3, 40, 64)) for _ in range(2)))
    arrays = list(stored)
    if bits is not None:
        arrays = [part for parts in stored for part in parts]
        stored = [AffineWeights(*parts, bits, 32) for parts in stored]
    y = attention_of(BlockAttention(factory))(q, *stored, scale=0.1)
    truth = reference(q, *map(dequantized, stored), scale=0.1)
    assert relative_error(y, truth) < 1e-5
    assert not copied and all(any(given is array for given in seen) for array in arrays)
