"""Offsets past 2^31: large vocabularies and many experts, in buffers that take little memory.

Each kernel is first called with small arrays. The same launch is then repeated with arrays of a
large model's size, for the one threadgroup that reads or writes their end.
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
    """An array of zeros that takes memory only for what is written to it.

    The rest is reserved address space, which reads as zeros. `values` is numpy's view of it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.name = "sparse"
        self.size = prod(shape)
        self.flags = 3  # writable and initialised
        self.shape = shape
        self.ndim = len(shape)
        self.dtype = dtype
        storage = np.array(mx.zeros((), dtype)).dtype
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        room = mmap.mmap(-1, 2 * AROUND + self.size * storage.itemsize, flags=flags)
        self.values = np.ndarray(shape, storage, room, AROUND)


class RecordingFactory:
    """A factory of emulated kernels that records the last call."""

    def __call__(self, **definition):
        kernel = EmulatedKernel(**definition, checked=False)

        def call(**arguments):
            self.last_kernel = kernel
            self.last_arguments = arguments
            return kernel(**arguments)

        return call

    def repeat(self, output: SparseArray, group: int, grid: tuple[int, int, int], **large) -> None:
        """Launch one threadgroup of the last call again, with `large` inputs and output."""
        kernel = self.last_kernel
        arguments = self.last_arguments
        arrays = dict(zip(kernel.input_names, arguments["inputs"], strict=True)) | large
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
        launch(
            kernel.name,
            kernel.build.runtime,
            kernel.library(wrapper),
            grid,
            arguments["threadgroup"],
            [*memory, output],
            range(group, group + 1),
        )


def close(actual, expected) -> bool:
    """Whether numbers differ by the errors of float32 sums at most."""
    expected = np.array(expected, np.float64)
    error = np.abs(np.array(actual, np.float64) - expected).max()
    return error <= 1e-5 * np.abs(expected).max()


def stored(w, name: str) -> dict:
    """The arrays of weights, by the names of a kernel's inputs."""
    names = input_names(name, "plain" if isinstance(w, mx.array) else "affine")
    return dict(zip(names, inputs(w), strict=True))


@pytest.mark.parametrize(("bits", "depth"), [(None, 64), (8, 256)])
def test_weights_past_offset_2_to_the_31_are_read(bits, depth):
    """The last columns of a vocabulary with more weights, or 8-bit words, than 2^31."""
    mx.random.seed(0)
    factory = RecordingFactory()
    columns = FAR // 64 + 64  # a column has 64 weights, or 64 words of four 8-bit codes
    x = mx.random.normal((2, depth))
    w = random_weights((32, depth), dtype=mx.float32, bits=bits, group=128)
    [y] = VerifyMatmul(factory)(x, w)
    large = {}
    for name, array in stored(w, "a").items():
        large[name] = SparseArray((columns, array.shape[1]), array.dtype)
        large[name].values[-32:] = np.array(array)
    out = SparseArray((2, columns), mx.float32)
    tiles = columns // 32  # a tile has a threadgroup of 128 threads
    factory.repeat(out, tiles - 1, (tiles * 128, 1, 1), **large)
    assert close(out.values[:, -32:], y)


@pytest.mark.parametrize("bits", [None, 4])
def test_experts_past_offset_2_to_the_31_are_read(bits):
    mx.random.seed(4)
    factory = RecordingFactory()
    depth = 64
    columns = 4096
    weights_per_element = 8 if bits else 1  # 4-bit weights are stored in words
    count = (FAR // (depth * columns) + 2) * weights_per_element
    w = random_weights((2, 32, depth), mx.float32, bits)
    x = mx.random.normal((1, depth))
    [y] = VerifyMatmulMoe(factory)(x, w, experts=mx.full((1, 1), 1, mx.uint32))
    large = {}
    for key, array in stored(w, "w").items():
        large[key] = SparseArray((count, columns, array.shape[2]), array.dtype)
        large[key].values[-1, :32] = np.array(array[1])
    pairs = mx.full((8,), count - 1, mx.uint32)
    out = SparseArray((1, columns), mx.float32)
    factory.repeat(out, 0, (columns // 32 * 128, 1, 1), experts=pairs, **large)
    assert close(out.values[:, :32], y[:, 0])
