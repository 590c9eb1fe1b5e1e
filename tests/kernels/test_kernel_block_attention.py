"""Block attention on the emulated device, compared with softmax attention in numpy."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import (
    Case,
    attention_of,
    check,
    first_rows,
    inputs,
    reference,
    truth,
    with_room,
)
from kernel_check import (
    DTYPES,
    float64,
    kernel_factory,
    on_gpu_or_emulator,
    random_tree,
    relative_error,
    same_bits,
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
)
from dflash_mlx.kernels.weights import AffineWeights, dequantized

pytestmark = on_gpu_or_emulator


@pytest.fixture(scope="module")
def kernel():
    return attention_of(BlockAttention(kernel_factory()))


# Most pairs of a dtype, head size, group, cache, mask and length occur once.
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
    # A head has two groups of 32.
    Case(mx.bfloat16, key_heads=2, group=3, nodes=9, length=600, first=5, bits=8, bits_group=32),
    Case(mx.float32, key_heads=2, nodes=9, length=60, bits=4, bits_group=32, tree=True),
    # Windows that begin in another chunk, sinks over four chunks, and a large first position.
    Case(group=2, nodes=6, length=1800, first=777, window=1500),
    Case(group=2, nodes=6, length=1800, first=777, window=513, tree=True),
    Case(mx.float16, key_heads=2, group=2, nodes=3, length=1600, sinks=True),
    Case(mx.float16, group=4, nodes=5, length=2100, first=4095),
    # More query rows for a head of keys than a threadgroup takes: 264 to 384.
    Case(mx.bfloat16, group=12, nodes=24, length=90, first=480),
    Case(mx.float32, group=6, nodes=MOST_NODES, length=90, first=480),
    Case(mx.float16, 128, key_heads=2, group=8, nodes=33, length=90, first=480),
    Case(mx.bfloat16, 80, group=5, nodes=40, length=70, first=CHUNK - 20),
    Case(mx.float32, 192, group=5, nodes=40, length=70, first=CHUNK - 20),
    # Trees that begin before the end of a chunk, and at its end.
    Case(group=3, nodes=16, length=CHUNK + 13, tree=True),
    Case(group=3, nodes=7, length=CHUNK + 7, tree=True),
    Case(group=3, nodes=63, length=2 * CHUNK + 61, tree=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_and_reference_are_softmax_attention(case, kernel):
    args, named = case.arguments()
    check(kernel, args, **named)
    dequantized_args = [dequantized(array) for array in args]
    expected, _ = truth(*dequantized_args, **named)
    actual = reference(*dequantized_args, **named)
    assert relative_error(actual, mx.array(expected, mx.float32)) < 1e-5


# Calls that a traced step can make, in which `first` and the length are an array.
TRACEABLE = [case for case in CASES if not case.tree and (case.window or not case.first)]


@pytest.mark.parametrize("case", TRACEABLE, ids=str)
def test_spare_rows_at_the_end_of_a_buffer_change_no_bit(case, kernel):
    """A traced step attends to a cache's whole buffer; the array `place` tells the rows in use."""
    (queries, *stored), named = case.arguments()
    expected = kernel(queries, *stored, **named)
    place = mx.array([named.pop("first"), case.length], mx.int32)
    for room in (1, 300, 700):
        longer = [with_room(rows, room) for rows in stored]
        assert mx.array_equal(kernel(queries, *longer, **named, place=place), expected)
        result = reference(queries, *longer, **named, place=place)
        assert mx.array_equal(result, reference(queries, *stored, **named, first=int(place[0])))


@pytest.mark.parametrize("tree", [False, True])
def test_a_window_of_any_size_is_exact(tree, kernel):
    """Wherever in a tile of keys it begins."""
    case = Case(nodes=3, length=70, first=500, tree=tree)
    args, named = case.arguments()
    for window in range(1, 40):
        check(kernel, args, **named | {"window": window})


# Mostly float32, because half precision would round small differences away.
ROW_BY_ROW = [
    Case(head_dim=96, group=4, nodes=16, length=520, sinks=True),
    Case(head_dim=64, key_heads=2, group=3, nodes=16, length=262, first=260, window=100),
    Case(head_dim=256, nodes=16, length=70, first=450, bits=8),
    Case(mx.bfloat16, 128, key_heads=2, group=2, nodes=16, length=100),
]


@pytest.mark.parametrize("case", ROW_BY_ROW, ids=str)
def test_a_row_has_the_same_bits_whatever_rows_share_the_call(case, kernel):
    """The first rows of a block, and each row alone; later rows are then not in the cache."""
    (queries, *stored), named = case.arguments()
    block = kernel(queries, *stored, **named)
    for rows in range(1, case.nodes):
        stored_rows = [first_rows(x, case.length - case.nodes + rows) for x in stored]
        first = queries[:, :, :rows]
        last = queries[:, :, rows - 1 : rows]
        assert same_bits(kernel(first, *stored_rows, **named), block[:, :, :rows])
        assert same_bits(kernel(last, *stored_rows, **named), block[:, :, rows - 1 : rows])


def test_rows_that_a_sliding_cache_has_dropped_change_no_bits(kernel):
    """A verification leaves more rows outside the window in the cache than a step of one row."""
    case = Case(group=3, nodes=3, length=190, first=400, window=60)
    (queries, keys, values), named = case.arguments()
    whole = kernel(queries, keys, values, **named)
    seen_by_block = 60 + 3 - 1  # the first of 3 rows sees 60, and each further row one more
    for dropped in (1, 100, 190 - seen_by_block):
        named["first"] = 400 + dropped
        result = kernel(queries, keys[:, :, dropped:], values[:, :, dropped:], **named)
        assert same_bits(result, whole)


@pytest.mark.parametrize("past", [0, 200, 250, 256])
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(past, kernel):
    """Though siblings are stored in between. The tree is before, in or after the end of a chunk."""
    case = Case(group=3, nodes=24, length=past + 24, first=259, window=190, tree=True)
    (queries, keys, values), named = case.arguments()
    block = kernel(queries, keys, values, **named)
    ancestors = np.array(named.pop("tree").ancestors)
    for node in (0, 1, 12, 23):
        path = mx.array(np.nonzero(ancestors[node])[0])
        rows = mx.concatenate([mx.arange(past), past + path])
        chain = kernel(
            mx.take(queries, path, axis=2),
            mx.take(keys, rows, axis=2),
            mx.take(values, rows, axis=2),
            **named,
        )
        assert same_bits(chain[:, :, -1], block[:, :, node])


def test_a_prepared_launch_is_not_used_for_other_arguments(kernel):
    """Calls with another number or array give what a new kernel gives, though shapes are equal."""
    args, plain = Case(nodes=9, length=40).arguments()
    variants: list[dict[str, Any]] = [{}, {"first": 490}, {"window": 9}, {"scale": 1.0}]
    variants += [{"sinks": mx.array([level])} for level in (0.0, 1.0)]
    for seed in range(2):
        depths, ancestors = random_tree(9, seed)
        past = 40 - 9
        variants.append({"tree": TreeMask(past + depths, ancestors)})
    for changes in variants:
        new_kernel = attention_of(BlockAttention(kernel_factory()))
        expected = new_kernel(*args, **plain | changes)
        assert same_bits(kernel(*args, **plain | changes), expected), changes


def test_a_long_answer_keeps_few_prepared_launches():
    kernel = BlockAttention(Recorder())
    args, named = Case(nodes=2).arguments()
    for first in range(3 * MOST_STEPS):
        kernel(AttentionCall(*args, **named | {"first": first}))
    assert len(kernel._known) <= MOST_STEPS


def test_queries_keys_and_values_may_have_any_memory_layout(kernel):
    """Queries are heads-last in memory in layers without rotations, which would copy them."""
    (queries, keys, values), named = Case(mx.float16, key_heads=3, nodes=5, length=35).arguments()
    expected = kernel(queries, keys, values, **named)
    transposed_keys = mx.contiguous(keys.swapaxes(2, 3)).swapaxes(2, 3)
    transposed_values = mx.contiguous(values.swapaxes(2, 3)).swapaxes(2, 3)
    assert same_bits(kernel(queries, transposed_keys, transposed_values, **named), expected)
    heads_last = mx.contiguous(queries.swapaxes(1, 2)).swapaxes(1, 2)
    assert same_bits(kernel(heads_last, keys, values, **named), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_give_finite_and_right_results(kernel, dtype, sign):
    """Scores of about 1e5 or -1e5, over two chunks: only the largest have weight."""
    queries, keys, values = inputs(dtype, heads=(2, 1), nodes=3, length=530)
    queries = mx.zeros_like(queries)
    queries[..., 0] = 100.0
    keys = mx.zeros_like(keys)
    # Scores of 7 sizes, 500 apart, so that the largest ones have nearly all of the weight.
    keys[..., 0] = sign * (100.0 + 0.5 * (mx.arange(530) % 7))
    y = kernel(queries, keys, values, scale=10.0)
    expected, _ = truth(queries, keys, values, scale=10.0, first=0)
    assert mx.isfinite(y).all().item()
    tolerance = 2.0**-7  # the distance of neighbouring bfloat16 numbers
    assert np.abs(float64(y) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("which,bad", [(1, mx.nan), (2, mx.nan), (2, -mx.inf)])
def test_a_nan_or_infinite_key_or_value_affects_only_rows_that_see_it(kernel, dtype, which, bad):
    """A row of the draft, which earlier rows do not see, and one outside the window of most rows.

    `which` is 1 for a key and 2 for a value.
    """
    past = 508
    nodes = 9
    named = {"scale": 0.125, "window": 20}
    args = inputs(dtype, heads=(4, 2), nodes=nodes, length=past + nodes)
    depths, ancestors = random_tree(nodes)
    for tree in (None, TreeMask(past + depths, ancestors)):
        seen = np.tri(nodes, dtype=bool) if tree is None else np.array(ancestors)
        positions = np.arange(nodes) if tree is None else np.array(depths)
        good = kernel(*args, **named, first=0, tree=tree)
        # With a window of 20, only the first two positions still see row past - 18.
        for bad_row, sees_bad_row in ((past - 18, positions < 2), (past + 4, seen[:, 4])):
            changed = [mx.array(array) for array in args]
            changed[which][0, 1, bad_row, 3] = bad
            y = kernel(*changed, **named, first=0, tree=tree)
            affected = mx.array(np.nonzero(sees_bad_row)[0])
            others = mx.array(np.nonzero(~sees_bad_row)[0])
            assert affected.size and others.size
            assert same_bits(y[:, :2], good[:, :2])  # query heads of the other head of keys
            assert same_bits(y[:, 2:, others], good[:, 2:, others])
            assert not mx.isfinite(y[:, 2:, affected]).any().item()


def test_shapes_and_dtypes_without_a_kernel_are_refused(kernel):
    """By the kernel and by the reference, also after calls that prepared launches."""
    (queries, keys, values), named = Case(mx.float16, nodes=3, length=8).arguments()
    tree = TreeMask(mx.zeros(2), mx.zeros((2, 2)))
    eight_bit = AffineWeights(*mx.quantize(keys, 64, 8), 8, 64)
    four_bit = AffineWeights(*mx.quantize(keys, 64, 4), 4, 64)
    for stored in (keys, eight_bit):
        kernel(queries, stored, stored, **named)
    too_many_rows = mx.zeros((1, 1, MOST_NODES + 1, 64))
    head_size_72 = [mx.zeros((*array.shape[:3], 72)) for array in (queries, keys, values)]
    for args, extra in [
        ((too_many_rows, too_many_rows, too_many_rows), {}),
        (head_size_72, {}),
        ((queries, keys, values[:, :, 1:]), {}),  # fewer values than keys
        ((queries, keys[:, :, :2], values[:, :, :2]), {}),  # fewer keys than queries
        ((queries, keys.astype(mx.float32), values.astype(mx.float32)), {}),
        ((queries, eight_bit, four_bit), {}),
        ((queries, keys, values), {"sinks": mx.zeros(3)}),  # sinks of 3 heads, queries of one
        ((queries, keys, values), {"tree": tree}),  # a tree of 2 nodes, and 3 queries
        ((queries, keys, values), {"tree": TreeMask(mx.zeros(3), tree.ancestors)}),
    ]:
        for attention in (kernel, reference):
            with pytest.raises(KernelError, match="Block attention has no kernel"):
                attention(*args, **named | extra)


@pytest.mark.parametrize("length", [17_000, 33_100, 66_100])
def test_attention_over_long_contexts_is_right(length):
    """Up to more keys than a 16-bit index can count. The newest 500 have the largest weights."""
    unchecked = attention_of(BlockAttention(kernel_factory(checked=False)))
    mx.random.seed(length)
    queries = mx.random.normal((1, 1, 2, 64))
    keys = mx.random.normal((1, 1, length, 64))
    values = mx.random.normal((1, 1, length, 64))
    keys[:, :, -500:] *= 3
    window = length - 100
    y = unchecked(queries, keys, values, scale=0.125, window=window)
    expected = reference(queries, keys, values, scale=0.125, window=window)
    assert relative_error(y, expected) < 1e-4
    chain = TreeMask(mx.array([length - 2, length - 1]), mx.array([[True, False], [True, True]]))
    y = unchecked(queries, keys, values, scale=0.125, tree=chain)
    assert relative_error(y, reference(queries, keys, values, scale=0.125)) < 1e-4


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_rows_of_a_cache_are_not_copied(bits):
    """mlx-lm's caches have room for 256 rows and return a slice, which is not contiguous."""
    copying_kernels: list[str] = []
    launch_inputs: list[mx.array] = []

    def factory(**definition):
        kernel = kernel_factory()(**definition)
        if definition.get("ensure_row_contiguous", True) and "keys" in definition["input_names"]:
            copying_kernels.append(definition["name"])

        def launch(inputs, **call):
            launch_inputs.extend(inputs)
            return kernel(inputs=inputs, **call)

        return launch

    cache = KVCache() if bits is None else QuantizedKVCache(group_size=32, bits=bits)
    mx.random.seed(4)
    queries = mx.random.normal((1, 6, 4, 64))
    new_keys = mx.random.normal((1, 3, 40, 64))
    new_values = mx.random.normal((1, 3, 40, 64))
    keys, values = cache.update_and_fetch(new_keys, new_values)
    if bits is None:
        arrays = [keys, values]
    else:
        arrays = [*keys, *values]
        keys = AffineWeights(*keys, bits, 32)
        values = AffineWeights(*values, bits, 32)
    y = attention_of(BlockAttention(factory))(queries, keys, values, scale=0.1)
    expected = reference(queries, dequantized(keys), dequantized(values), scale=0.1)
    assert relative_error(y, expected) < 1e-5
    assert not copying_kernels
    assert {id(array) for array in arrays} <= {id(array) for array in launch_inputs}
