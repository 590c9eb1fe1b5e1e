"""Offsets past 2^31: large vocabularies and many experts, in buffers that are mostly air.

Each kernel is called once, small, by its wrapper; the same call is then made of arrays as large as
those of a large model, for the one threadgroup that reads or writes their end.
"""

import mmap
from math import prod

import mlx.core as mx
import numpy as np
import pytest
from kernel_check import random_weights
from metal_host import EmulatedKernel, needs_compiler
from metal_host.kernel import described
from metal_host.launch import Memory, launch

from dflash_mlx.kernels.verify_matmul import VerifyMatmul
from dflash_mlx.kernels.verify_matmul_moe import VerifyMatmulMoe
from dflash_mlx.kernels.weights import input_names, inputs

pytestmark = needs_compiler

FAR = 2**31
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which `mmap` has from Python 3.13 on
AROUND = 2**34  # bytes on both sides, so that an offset cut to 32 bits finds zeros


class SparseArray(Memory):
    """An array of zeros, in as little memory as what is written to it takes.

    Address space is reserved and nothing else; what is never written reads as zeros. `values` is
    numpy's view of it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.name = "sparse"
        self.size = prod(shape)
        self.flags = 3
        self.shape = shape
        self.ndim = len(shape)
        self.dtype = dtype
        storage = np.array(mx.zeros((), dtype)).dtype
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        room = mmap.mmap(-1, 2 * AROUND + self.size * storage.itemsize, flags=flags)
        self.values = np.ndarray(shape, storage, room, AROUND)


class Calls:
    """A factory of kernels that keeps the last call."""

    def __call__(self, **definition):
        kernel = EmulatedKernel(**definition, checked=False)

        def call(**given):
            self.last = kernel, given
            return kernel(**given)

        return call

    def again(self, output: SparseArray, group: int, grid: tuple[int, int, int], **large) -> None:
        """One threadgroup of the last call, with other inputs and its one output, in place."""
        kernel, given = self.last
        arrays = dict(zip(kernel.input_names, given["inputs"], strict=True)) | large
        wrapper = kernel.wrapper([*arrays.values()], [output.dtype])
        memory: list[Memory] = []
        for parameter in wrapper.parameters[:-1]:
            array = arrays[parameter.array]
            values = array.values if isinstance(array, SparseArray) else np.array(array)
            if isinstance(array, SparseArray) and not parameter.suffix:
                memory.append(array)
            else:
                description = described(values, parameter.suffix)
                memory.append(
                    Memory(parameter.name, values=description, writable=False, initialised=True)
                )
        sizes = grid, given["threadgroup"], [*memory, output]
        library = kernel.library(wrapper)
        launch(kernel.name, kernel.build.runtime, library, *sizes, range(group, group + 1))


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
    calls = Calls()
    columns = FAR // 64 + 64
    x = mx.random.normal((2, depth))
    w = random_weights((32, depth), dtype=mx.float32, bits=bits, group=128)
    [y] = VerifyMatmul(calls)(x, w)
    large = {}
    for name, array in stored(w, "a").items():
        large[name] = SparseArray((columns, array.shape[1]), array.dtype)
        large[name].values[-32:] = np.array(array)
    out = SparseArray((2, columns), mx.float32)
    tiles = columns // 32
    calls.again(out, tiles - 1, (tiles * 128, 1, 1), **large)
    assert close(out.values[:, -32:], y)


@pytest.mark.parametrize("bits", [None, 4])
def test_an_expert_past_two_to_the_31(bits):
    mx.random.seed(4)
    calls = Calls()
    depth = 64
    columns = 4096
    count = (FAR // (depth * columns) + 2) * (8 if bits else 1)
    w = random_weights((2, 32, depth), mx.float32, bits)
    x = mx.random.normal((1, depth))
    [y] = VerifyMatmulMoe(calls)(x, w, experts=mx.full((1, 1), 1, mx.uint32))
    large = {}
    for key, array in stored(w, "w").items():
        large[key] = SparseArray((count, columns, array.shape[2]), array.dtype)
        large[key].values[-1, :32] = np.array(array[1])
    pairs = mx.full((8,), count - 1, mx.uint32)
    out = SparseArray((1, columns), mx.float32)
    calls.again(out, 0, (columns // 32 * 128, 1, 1), experts=pairs, **large)
    assert close(out.values[:, :32], y[:, 0])
