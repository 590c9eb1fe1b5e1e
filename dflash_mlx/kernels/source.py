"""The Metal sources as the single header string that a kernel factory takes.

`mx.fast.metal_kernel` compiles an ASCII string and finds no files; in `metal/` the kernels are
ordinary files with local includes. MLX writes and hashes the whole text at every call, so comments,
indentation and empty lines are removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any

import mlx.core as mx

from ..errors import KernelError
from ..validation import error_text

# The signature of `mx.fast.metal_kernel`: name, input_names, output_names, source and header give a
# function of inputs, template, grid, threadgroup, output_shapes and output_dtypes.
KernelFactory = Callable[..., Any]
# A kernel with all of its call but the inputs, which shapes and dtypes determine.
Launch = partial[list[mx.array]]


_COMMENT = re.compile(r"//.*")
_LOCAL_INCLUDE = re.compile(r'^#include "(?P<name>[^"]+)"$')
_MLX_ERRORS = (RuntimeError, ValueError)  # of a launch that MLX refuses
FEWEST = 8  # elements: MLX declares a smaller input `constant` instead of `device`


def metal_source(name: str) -> str:
    """The file `metal/<name>` with every `#include "file"` replaced by that file, once each.

    `#include <...>` lines stay, comments go. Raises `KernelError` for a character outside ASCII.
    """
    return "".join(_lines(name, set()))


def _lines(name: str, seen: set[str]) -> list[str]:
    """The lines of a file and of what it includes; `seen` gains their names."""
    seen.add(name)
    lines = []
    for line in files("dflash_mlx.metal").joinpath(name).read_text("utf-8").splitlines():
        include = _LOCAL_INCLUDE.match(line)
        if not line.isascii():
            raise KernelError(f"metal/{name} has a character outside ASCII: {line.strip()}")
        if include and include["name"] not in seen:
            lines += _lines(include["name"], seen)
        elif not include and line != "#pragma once":
            code = _COMMENT.sub("", line).strip()
            lines += [code + "\n"] if code else []
    return lines


def guarded(metal_kernel: KernelFactory) -> KernelFactory:
    """A factory whose kernels raise `KernelError` for a launch that MLX refuses.

    MLX may refuse one only when it computes it. Then its own error comes out of the step: it does
    not say whose launch it was.
    """

    def make(name: str, **definition: Any) -> Any:
        kernel = metal_kernel(name=name, **definition)

        def launch(**call: Any) -> Any:
            try:
                return kernel(**call)
            except _MLX_ERRORS as error:
                raise KernelError(f"The kernel {name} fails ({error_text(error)}).") from error

        return launch

    return make


def in_device_memory(array: mx.array) -> mx.array:
    """The array, flat and with zeros up to 8 elements if it has fewer; else as it is.

    MLX passes smaller inputs as `const constant T*`, which does not convert to the
    `const device T*` of our functions. Only for inputs whose shape the kernel does not read.
    """
    if array.size >= FEWEST:
        return array
    return mx.pad(array.reshape(-1), (0, FEWEST - array.size))


def dtype_name(array: Any) -> str:
    """The dtype of an array for a message: `bfloat16`."""
    return str(array.dtype).split(".")[-1]
