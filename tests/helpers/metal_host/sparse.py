"""Arrays of which a kernel touches a few elements, larger than what can be held: offsets past 2^31.

Address space is reserved and nothing else; what is never written reads as zeros. On both sides lies
as much again, so that an offset cut to 32 bits finds zeros, not the end of the process.
"""

import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from metal_host.kernel import EmulatedKernel, described
from metal_host.launch import Memory, launch

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which `mmap` has from Python 3.13 on
_AROUND = 2**34  # bytes: more than 2^32 elements of four


class SparseArray:
    """An array of zeros, in as little memory as what is written to it takes.

    shape, dtype: as MLX's
    strides:      in elements; those of whole rows by default

    `values` is numpy's view of it. bfloat16 is not supported.
    """

    def __init__(
        self, shape: Sequence[int], dtype: mx.Dtype, strides: Sequence[int] | None = None
    ) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.size, self.ndim = prod(shape), len(shape)
        storage = np.array(mx.zeros((), dtype)).dtype
        if strides is None:
            strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        bytes_of = [stride * storage.itemsize for stride in strides]
        reach = sum((n - 1) * step for n, step in zip(shape, bytes_of, strict=True))
        self._room = mmap.mmap(
            -1,
            2 * _AROUND + reach + storage.itemsize,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
        )
        self.values = np.ndarray(self.shape, storage, self._room, _AROUND, bytes_of)


class _InPlace(Memory):
    """The buffer of a sparse array, which cannot be copied between red zones."""

    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name, self.values, self.size, self.flags = name, values, 0, 3


def run_part(
    kernel: EmulatedKernel,
    inputs: Mapping[str, mx.array | SparseArray],
    outputs: Mapping[str, SparseArray],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    groups: range,
) -> None:
    """Runs some threadgroups of an unchecked kernel on these arrays, in place.

    groups: which ones, counted along x, then y, then z.
    """
    if kernel.build.checked:
        raise ValueError("a checked kernel keeps a shadow of its buffers: too large here")
    given = [inputs[name] for name in kernel.input_names]
    dtypes = [outputs[name].dtype for name in kernel.output_names]
    wrapper = kernel.wrapper(given, dtypes)
    values: dict[str, Any] = {name: _values(array) for name, array in inputs.items()}
    memory: list[Memory] = []
    for parameter in wrapper.parameters[: -len(dtypes)]:
        array = described(values[parameter.array], parameter.suffix)
        if parameter.suffix == "" and isinstance(inputs[parameter.array], SparseArray):
            memory.append(_InPlace(parameter.name, array))
        else:
            memory.append(Memory(parameter.name, array, False, True))
    memory += [_InPlace(name, outputs[name].values) for name in kernel.output_names]
    library = kernel.library(wrapper)
    launch(kernel.name, kernel.build.runtime, library, grid, threadgroup, memory, groups)


def _values(array: mx.array | SparseArray) -> np.ndarray:
    return array.values if isinstance(array, SparseArray) else np.array(array)
