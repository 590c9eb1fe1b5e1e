"""Offsets past 2^31: large vocabularies, many experts, long caches, in buffers that are mostly air.

Each kernel is called once, small, by its wrapper; the same call is then made of arrays as large as
those of a large model, for the one threadgroup that reads or writes their end.
"""

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import random_weights
from metal_host import EmulatedKernel, needs_compiler
from metal_host.sparse import SparseArray, run_part

from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe
from dflash_mlx.kernels.weights import input_names, inputs

pytestmark = needs_compiler

FAR = 2**31


class Calls:
    """A factory of kernels that keeps the last call."""

    def __call__(self, **definition):
        kernel = EmulatedKernel(**definition, checked=False)

        def call(**given):
            self.last = kernel, given
            return kernel(**given)

        return call

    def again(self, outputs, groups: range, grid=None, **inputs) -> None:
        """The last call, with other inputs, outputs and threadgroups."""
        kernel, given = self.last
        arrays = dict(zip(kernel.input_names, given["inputs"], strict=True)) | inputs
        sizes = grid or given["grid"], given["threadgroup"]
        run_part(kernel, arrays, outputs, *sizes, groups)


def close(got, expected) -> bool:
    expected = np.array(expected, np.float64)
    return np.abs(np.array(got, np.float64) - expected).max() <= 1e-5 * np.abs(expected).max()


def stored(w, name: str) -> dict:
    """A kernel's arrays of some weights by name."""
    names = input_names(name, "plain" if isinstance(w, mx.array) else "affine")
    return dict(zip(names, inputs(w), strict=True))


@pytest.mark.parametrize(("bits", "depth"), [(None, 64), (8, 256)])
def test_a_vocabulary_of_more_than_two_to_the_31_weights(bits, depth):
    """Or as many words of 8 bits, which have 2^26 scales and biases."""
    mx.random.seed(0)
    calls, columns = Calls(), FAR // 64 + 64
    x, w = mx.random.normal((2, depth)), random_weights((32, depth), mx.float32, bits, 128)
    [y] = VerifyMatmul(calls)(x, w)
    arrays = stored(w, "a")
    large = {}
    for name, array in arrays.items():
        large[name] = SparseArray((columns, array.shape[1]), array.dtype)
        large[name].values[-32:] = np.array(array)
    out, tiles = SparseArray((2, columns), mx.float32), columns // 32
    last = range(tiles - 1, tiles)
    calls.again({"y_a": out}, last, (tiles * 128, 1, 1), **large)
    assert close(out.values[:, -32:], y)


def test_an_expert_past_two_to_the_31():
    mx.random.seed(4)
    calls, depth, columns = Calls(), 64, 4096
    count = FAR // (depth * columns) + 2
    experts = mx.full((1, 1), 1, mx.uint32)
    for bits in (None, 4):
        w = random_weights((2, 32, depth), mx.float32, bits)
        x = mx.random.normal((1, depth))
        [y] = VerifyMatmulMoe(calls)(x, w, experts=experts)
        arrays = stored(w, "w")
        of, large = 8 if bits else 1, {}
        for key, array in arrays.items():
            shape = (count * of, columns, array.shape[2])
            large[key] = SparseArray(shape, array.dtype)
            large[key].values[-1, :32] = np.array(array[1])
        pairs = mx.full((8,), count * of - 1, mx.uint32)
        out = SparseArray((1, columns), mx.float32)
        calls.again({"y": out}, range(1), (columns // 32 * 128, 1, 1), experts=pairs, **large)
        assert close(out.values[:, :32], y[:, 0])
