"""Offsets past 2^31: large vocabularies, many experts, long caches, in buffers that are mostly air.

Each kernel is called once, small, by its wrapper; the same call is then made of arrays as large as
those of a large model, for the one threadgroup that reads or writes their end.
"""

import mlx.core as mx
import numpy as np
from kernel_check import random_weights
from metal_host import EmulatedKernel, needs_compiler
from metal_host.sparse import SparseArray, run_part

from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe

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
