"""Offsets past 2^31: large vocabularies, many experts, long caches, in buffers that are mostly air.

Each kernel is called once, small, by its wrapper; the same call is then made of arrays as large as
those of a large model, for the one threadgroup that reads or writes their end.
"""

import mlx.core as mx
import numpy as np
from kernel_check import random_weights
from metal_host import EmulatedKernel, needs_compiler
from metal_host.sparse import SparseArray, run_part

from dflash_mlx.kernels.block_attention import CHUNK, BlockAttention
from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe
from dflash_mlx.kernels.verify_qkv import VerifyQkv
from dflash_mlx.kernels.weights import AffineWeights

pytestmark = needs_compiler

FAR = 2**31


class Calls:
    """A factory of kernels that keeps each kernel's last call."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[EmulatedKernel, dict]] = {}

    def __call__(self, **definition):
        kernel = EmulatedKernel(**definition, checked=False)

        def call(**given):
            self.last[kernel.name] = kernel, given
            return kernel(**given)

        return call

    def again(self, name: str, outputs, groups: range, grid=None, **inputs) -> None:
        """The last call of a kernel, with other inputs, outputs and threadgroups."""
        kernel, given = self.last[name]
        arrays = dict(zip(kernel.input_names, given["inputs"], strict=True)) | inputs
        sizes = grid or given["grid"], given["threadgroup"]
        run_part(kernel, arrays, outputs, given["template"], *sizes, groups)


def close(got, expected) -> bool:
    expected = np.array(expected, np.float64)
    return np.abs(np.array(got, np.float64) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_vocabulary_of_more_than_two_to_the_31_weights():
    mx.random.seed(0)
    calls, depth, columns = Calls(), 64, FAR // 64 + 64
    x, w = mx.random.normal((2, depth)), random_weights((32, depth), mx.float32)
    y = VerifyMatmul(calls)(x, w)
    large = SparseArray((columns, depth), mx.float32)
    large.values[-32:] = np.array(w)
    out = SparseArray((2, columns), mx.float32)
    tiles = columns // 32
    calls.again(
        "verify_matmul_plain", {"y": out}, range(tiles - 1, tiles), (tiles * 128, 1, 1), w=large
    )
    assert close(out.values[:, -32:], y)


def test_quantized_words_past_two_to_the_31():
    """And groups: the words of 8 bits, 2^31 of them, have 2^26 scales and biases."""
    mx.random.seed(1)
    calls, depth, columns = Calls(), 256, FAR // 64 + 64
    x, w = mx.random.normal((2, depth)), random_weights((32, depth), mx.float32, 8, 128)
    y = VerifyMatmul(calls)(x, w)
    arrays = {"w": w.words, "w_scales": w.scales, "w_biases": w.biases}
    large = {}
    for name, array in arrays.items():
        large[name] = SparseArray((columns, array.shape[1]), array.dtype)
        large[name].values[-32:] = np.array(array)
    out = SparseArray((2, columns), mx.float32)
    tiles = columns // 32
    calls.again(
        "verify_matmul_affine", {"y": out}, range(tiles - 1, tiles), (tiles * 128, 1, 1), **large
    )
    assert close(out.values[:, -32:], y)


def test_rows_of_results_past_two_to_the_31():
    """64 rows of 2^26 columns: what a row's number is multiplied by is as large as a vocabulary."""
    mx.random.seed(2)
    calls, depth, columns = Calls(), 8, 2**26
    x, w = mx.random.normal((64, depth)), random_weights((32, depth), mx.float32)
    y = VerifyMatmul(calls)(x, w)
    large, out = (SparseArray(s, mx.float32) for s in ((columns, depth), (64, columns)))
    large.values[-32:] = np.array(w)
    tiles = columns // 32
    last = 3 * tiles + tiles - 1  # of the fourth tile of rows
    calls.again(
        "verify_matmul_plain", {"y": out}, range(last, last + 1), (tiles * 128, 1, 4), w=large
    )
    assert close(out.values[48:, -32:], y[48:])


def test_split_sums_past_two_to_the_31():
    mx.random.seed(3)
    calls, depth, columns = Calls(), 1024, 2**25
    x, w = mx.random.normal((64, depth)), random_weights((8, depth), mx.float32)
    y = VerifyMatmul(calls)(x, w)
    kernel, given = calls.last["verify_matmul_plain"]
    splits = given["grid"][1]
    assert splits == 2
    large = SparseArray((columns, depth), mx.float32)
    large.values[:8] = np.array(w)
    sums = SparseArray((splits, 1, 64, columns), mx.float32)
    tiles = columns // 32
    for split in range(splits):
        first = (3 * splits + split) * tiles  # the fourth tile of rows, the first columns
        grid = (tiles * 128, splits, 4)
        calls.again("verify_matmul_plain", {"y": sums}, range(first, first + 1), grid, w=large)
    assert close(sums.values[:, 0, 48:, :8].sum(0), y[48:])
    merged, size = SparseArray((64, columns), mx.float32), 64 * columns
    at = 48 * columns
    calls.again(
        "merge_splits",
        {"y": merged},
        range(at // 256, at // 256 + 1),
        (size, 1, 1),
        sums=sums,
    )
    assert close(merged.values[48, :8], y[48])


def test_rows_past_two_to_the_31():
    """As many as nobody verifies, each short: of x and of the result, and of the sums to merge."""
    mx.random.seed(8)
    calls, depth, columns = Calls(), 64, 64
    x, w = mx.random.normal((16, depth)), random_weights((columns, depth), mx.float32)
    y = VerifyMatmul(calls)(x, w)
    rows, out = (SparseArray((FAR // 64 + 16, n), mx.float32) for n in (depth, columns))
    rows.values[-16:] = np.array(x)
    tiles = rows.shape[0] // 16
    last = 2 * (tiles - 1)
    calls.again(
        "verify_matmul_plain", {"y": out}, range(last, last + 2), (2 * 128, 1, tiles), x=rows
    )
    assert close(out.values[-16:], y)


def test_pairs_past_two_to_the_31():
    """The last of as many rows, each with an expert of its own."""
    mx.random.seed(9)
    calls, depth, columns = Calls(), 64, 64
    x, w = mx.random.normal((1, depth)), random_weights((2, columns, depth), mx.float32)
    y = VerifyMatmulMoe(calls)(x, w, mx.array([[1]]))
    count = FAR // 64 + 1
    rows, out = (SparseArray((count, n), mx.float32) for n in (depth, columns))
    rows.values[-1] = np.array(x)
    experts, order = (SparseArray((count,), mx.uint32) for _ in range(2))
    experts.values[-1] = 1
    order.values[0] = count - 1
    name, grid = "verify_matmul_moe_plain", (2 * 128, count, 1)
    calls.again(name, {"y": out}, range(2), grid, x=rows, experts=experts, order=order)
    assert close(out.values[-1:], y[:, 0])


def test_sums_side_by_side_past_two_to_the_31():
    mx.random.seed(10)
    calls, columns, depth = Calls(), (40, 24), 1024
    x, weights = (
        mx.random.normal((16, depth)),
        [random_weights((n, depth), mx.float32) for n in columns],
    )
    y = VerifyQkv(calls)(x, weights)
    _, given = calls.last["merge_qkv_2"]
    (sums,) = given["inputs"]
    rows = FAR // 64 + 16
    large = SparseArray((2, rows, 64), mx.float32)
    large.values[:, -16:] = np.array(sums)
    outputs = {
        f"y_{c}": SparseArray((rows, n), mx.float32) for c, n in zip("ab", columns, strict=True)
    }
    calls.again("merge_qkv_2", outputs, range(rows - 16, rows), (64, rows, 1), sums=large)
    for name, result in zip(("y_a", "y_b"), y, strict=True):
        assert close(outputs[name].values[-16:], result)


def test_an_expert_past_two_to_the_31():
    mx.random.seed(4)
    calls, depth, columns = Calls(), 64, 4096
    count = FAR // (depth * columns) + 2
    experts = mx.full((1, 1), 1, mx.uint32)
    for bits in (None, 4):
        w = random_weights((2, 32, depth), mx.float32, bits)
        x = mx.random.normal((1, depth))
        y = VerifyMatmulMoe(calls)(x, w, experts)
        name = "verify_matmul_moe_affine" if bits else "verify_matmul_moe_plain"
        arrays = {"w": w}
        of = 1
        if bits:
            arrays, of = {"w": w.words, "w_scales": w.scales, "w_biases": w.biases}, 8
        large = {}
        for key, array in arrays.items():
            shape = (count * of, columns, array.shape[2])
            large[key] = SparseArray(shape, array.dtype)
            large[key].values[-1, :32] = np.array(array[1])
        pairs = mx.full((8,), count * of - 1, mx.uint32)
        out = SparseArray((1, columns), mx.float32)
        calls.again(name, {"y": out}, range(1), (columns // 32 * 128, 1, 1), experts=pairs, **large)
        assert close(out.values[:, :32], y[:, 0])


def attention_inputs(keys, length, heads=1):
    """Random queries of one row, and as many keys and values."""
    shape = (1, heads, length, 64)
    return [mx.random.normal((1, heads, 1, 64)), *(mx.random.normal(shape) for _ in range(keys))]


def attended(calls, stats, partial):
    """What the chunk of a row comes to, from what the kernel left: its only chunk."""
    return partial.reshape(-1, 64) / stats.reshape(-1, 2)[:, 1:]


def test_a_cache_whose_rows_lie_far_apart():
    """Rows by rows, and heads by heads, of a cache with room for a long context."""
    mx.random.seed(5)
    calls, length = Calls(), 40
    queries, keys, values = attention_inputs(2, length, heads=2)
    y = BlockAttention(calls)(queries, keys, values, scale=0.1)
    for strides in ((1, 64, FAR // 16, 1), (1, FAR + 4096, 64, 1), (1, 64, 128, FAR // 32)):
        large = {}
        for name, array in (("keys", keys), ("values", values)):
            large[name] = SparseArray(array.shape, mx.float32, strides)
            large[name].values[...] = np.array(array)
        out = {
            "partial": SparseArray((1, 2, 64), mx.float32),
            "stats": SparseArray((1, 2, 2), mx.float32),
        }
        calls.again("block_attention", out, range(2), **large)
        got = attended(calls, out["stats"].values, out["partial"].values)
        assert close(got, y.reshape(2, 64)), strides


def test_a_quantized_cache_whose_rows_lie_far_apart():
    mx.random.seed(6)
    calls, length = Calls(), 40
    queries, *stored = attention_inputs(2, length)
    pair = [AffineWeights(*mx.quantize(x, 32, 8), 8, 32) for x in stored]
    y = BlockAttention(calls)(queries, *pair, scale=0.1)
    large = {}
    for name, w in zip(("key", "value"), pair, strict=True):
        for suffix, array in (("s", w.words), ("_scales", w.scales), ("_biases", w.biases)):
            wide = SparseArray(array.shape, array.dtype, (1, 1, FAR // 16, 1))
            wide.values[...] = np.array(array)
            large[name + suffix] = wide
    out = {
        "partial": SparseArray((1, 1, 64), mx.float32),
        "stats": SparseArray((1, 1, 2), mx.float32),
    }
    calls.again("block_attention_quantized", out, range(1), **large)
    got = attended(calls, out["stats"].values, out["partial"].values)
    assert close(got, y.reshape(1, 64))


def test_partial_sums_past_two_to_the_31():
    """The last of 2^21 chunks' sums of 16 rows: of every row, and then merged."""
    mx.random.seed(7)
    calls, length, heads, chunks = Calls(), 40, 16, FAR // (16 * 64) + 1
    queries = mx.random.normal((1, heads, 1, 64))
    keys, values = (mx.random.normal((1, 1, length, 64)) for _ in range(2))
    y = BlockAttention(calls)(queries, keys, values, scale=0.1)
    out = {
        "partial": SparseArray((chunks, heads, 64), mx.float32),
        "stats": SparseArray((chunks, heads, 2), mx.float32),
    }
    kernel, given = calls.last["block_attention"]
    of = dict(zip(kernel.input_names, given["inputs"], strict=True))
    # The cache begins so far back that the rows that there are lie in the last of the chunks.
    whole = SparseArray((1, 1, (chunks - 1) * CHUNK + length, 64), mx.float32, (0, 0, 64, 1))
    whole.values[0, 0, -length:] = np.array(keys[0, 0])
    other = SparseArray(whole.shape, mx.float32, (0, 0, 64, 1))
    other.values[0, 0, -length:] = np.array(values[0, 0])
    positions = np.array(of["positions"])
    positions[0] = whole.shape[2] - 1
    grid = (given["grid"][0], chunks, 1)
    calls.again(
        "block_attention",
        out,
        range(chunks - 1, chunks),
        grid,
        keys=whole,
        values=other,
        positions=mx.array(positions),
    )
    got = attended(calls, out["stats"].values[-1], out["partial"].values[-1])
    assert close(got, y.reshape(heads, 64))
