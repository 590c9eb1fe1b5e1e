"""A replacement for `mx.fast.metal_kernel` with the same arguments and results, on the CPU."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from metal_host.compiler import Build
from metal_host.launch import Memory, launch
from metal_host.wrapper import Wrapper, program, wrap

_MOST_THREADS = 1024  # in a threadgroup
_STORAGE = {mx.bfloat16: mx.uint16}  # numpy has no bfloat16


def _numpy(array: mx.array) -> np.ndarray:
    """The array's memory with its layout, without a copy where MLX allows it."""
    return np.array(array.view(_STORAGE.get(array.dtype, array.dtype)), copy=None)


def _mlx(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(values).view(dtype)


def _output(shape: Sequence[int], dtype: mx.Dtype) -> np.ndarray:
    """An output before the launch, with all bits set.

    That is NaN, so an element that a kernel does not write cannot pass for a zero.
    """
    empty = _numpy(mx.zeros(shape, dtype))
    return np.full(empty.nbytes, 0xFF, np.uint8).view(empty.dtype).reshape(shape)


def described(array: np.ndarray, suffix: str) -> np.ndarray:
    """The array, or its shape, strides or number of dimensions, as the suffix says."""
    if suffix == "_shape":
        return np.array(array.shape, np.int32)
    if suffix == "_strides":
        return np.array([stride // array.itemsize for stride in array.strides], np.int64)
    return np.array(array.ndim, np.int32) if suffix == "_ndim" else array


class EmulatedKernel:
    """A Metal kernel that runs on the CPU, with the arguments of `mx.fast.metal_kernel`.

    checked: find races, accesses out of bounds, uninitialised reads and all else that
        runtime/checks.cpp looks for; a finding raises CheckError.

    A source is compiled for each set of dtypes that it is called with. Arithmetic follows IEEE 754,
    as with MLX's default math mode, "safe".
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        *,
        checked: bool = True,
    ):
        (header + source).encode("ascii")  # MLX passes the text on as ASCII
        self.name = name
        self.input_names = list(input_names)
        self.output_names = list(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.build = Build(checked)
        self._libraries: dict[str, Path] = {}

    def wrapper(
        self,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
    ) -> Wrapper:
        """The Metal function that MLX would compile for a call with these arguments."""
        return wrap(
            self.name,
            inputs=list(zip(self.input_names, inputs, strict=True)),
            outputs=list(zip(self.output_names, output_dtypes, strict=True)),
            header=self.header,
            body=self.source,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | bool | int | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        """Runs the kernel before it returns. Raises CheckError for findings."""
        if min(*grid, *threadgroup) < 1:
            raise ValueError(f"A launch of {grid} threads in groups of {threadgroup}.")
        if prod(threadgroup) > _MOST_THREADS:
            raise ValueError(f"A threadgroup has at most {_MOST_THREADS} threads.")
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        if self.ensure_row_contiguous:
            arrays = [mx.contiguous(array) for array in arrays]
        wrapper = self.wrapper(arrays, output_dtypes)
        outputs = [
            Memory(name, values=_output(shape, dtype), writable=True, initialised=False)
            for name, shape, dtype in zip(
                self.output_names, output_shapes, output_dtypes, strict=True
            )
        ]
        launch(
            self.name,
            runtime=self.build.runtime,
            library=self.library(wrapper),
            grid=grid,
            threadgroup=threadgroup,
            memory=self._input_memory(wrapper, arrays) + outputs,
        )
        return [
            _mlx(memory.values, dtype) for memory, dtype in zip(outputs, output_dtypes, strict=True)
        ]

    def library(self, wrapper: Wrapper) -> Path:
        """The compiled kernel."""
        if wrapper.name not in self._libraries:
            self._libraries[wrapper.name] = self.build.kernel(program(wrapper))
        return self._libraries[wrapper.name]

    def _input_memory(self, wrapper: Wrapper, arrays: Sequence[mx.array]) -> list[Memory]:
        values = dict(zip(self.input_names, map(_numpy, arrays), strict=True))
        memory = []
        for parameter in wrapper.parameters[: -len(self.output_names)]:
            content = described(values[parameter.array], parameter.suffix)
            memory.append(Memory(parameter.name, values=content, writable=False, initialised=True))
        return memory
