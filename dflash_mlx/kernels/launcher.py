"""What kernels' wrappers share: a kernel as data, its launch, and the check before the first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import KernelError
from ..validation import error_text
from .selfcheck import KernelCheck, KernelChecks
from .source import metal_source

# The signature of `mx.fast.metal_kernel`: name, input_names, output_names, source and header give a
# function of inputs, grid, threadgroup, output_shapes and output_dtypes.
KernelFactory = Callable[..., Any]
Constant = mx.Dtype | int | bool
Calls = Iterator[Callable[[], Any]]
Prepared = TypeVar("Prepared")

METAL_TYPES = {mx.float16: "half", mx.bfloat16: "bfloat", mx.float32: "float"}
FEWEST_ELEMENTS = 8  # MLX declares inputs with fewer elements `constant` instead of `device`
_MLX_ERRORS = (RuntimeError, ValueError)  # of a launch that MLX refuses


@dataclass(frozen=True)
class Kernel:
    """A kernel as data. Each set of constants makes a library of its own.

    The constants are text: handing them to MLX as template arguments takes 1.3 us of every call, in
    which it compiles a regular expression.

    Attributes:
        name: of the Metal function.
        file: in `metal/`, with what the body calls.
        inputs, outputs: the names of its arrays.
        body: of the Metal function.
        copies: whether MLX copies inputs that do not lie row by row.
    """

    name: str
    file: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    body: str
    copies: bool = True


class Launch:
    """A compiled kernel with everything that its calls need except the inputs.

    Raises `KernelError` for what MLX refuses. What MLX refuses only when it computes comes out of
    the step as MLX's own error, which does not name the kernel.
    """

    def __init__(self, name: str, kernel: Callable[..., list[mx.array]]) -> None:
        self._name = name
        self._kernel = kernel

    def __call__(self, inputs: list[mx.array]) -> list[mx.array]:
        """The kernel's outputs."""
        try:
            return self._kernel(inputs=inputs)
        except _MLX_ERRORS as error:
            raise KernelError(f"The kernel {self._name} fails ({error_text(error)}).") from error


class Launcher:
    """Base of a kernel's wrapper.

    Args:
        metal_kernel: compiles Metal sources; the tests have one that runs them on the CPU.
        checks: the launches that are known to be right here.
    """

    def __init__(
        self, metal_kernel: KernelFactory = mx.fast.metal_kernel, checks: KernelChecks | None = None
    ) -> None:
        self._metal_kernel = metal_kernel
        self._checks = checks or KernelChecks()
        self._compiled: dict[str, Any] = {}
        self._known: dict[Hashable, Any] = {}

    def instances(self, dtype: mx.Dtype, stored: mx.Dtype, tensor_units: bool) -> Calls:
        """Small calls of the kernel in every form that a model may need, the commonest first.

        Args:
            dtype: the type of rows.
            stored: the type of weights and gates. There are no calls if the kernel does not take
                both types together.
            tensor_units: whether products may run on tensor units.
        """
        raise NotImplementedError

    def _launch(
        self,
        kernel: Kernel,
        constants: dict[str, Constant],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: Iterable[tuple[Sequence[int], mx.Dtype]],
    ) -> Launch:
        """A launch of a kernel with these constants. Each kernel is compiled once."""
        declared = ""
        name = kernel.name
        for key, value in constants.items():
            if isinstance(value, mx.Dtype):
                declared += f"using {key} = {METAL_TYPES[value]};\n"
                name += f"_{METAL_TYPES[value]}"
            else:
                declared += f"constexpr {type(value).__name__} {key} = {int(value)};\n"
                name += f"_{key}{int(value)}"
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._metal_kernel(
                name=name,
                input_names=list(kernel.inputs),
                output_names=list(kernel.outputs),
                source=declared + kernel.body,
                header=metal_source(kernel.file),
                ensure_row_contiguous=kernel.copies,
            )
            self._compiled[name] = compiled
        shapes, dtypes = zip(*outputs, strict=True)
        size = {"grid": grid, "threadgroup": threadgroup}
        return Launch(name, partial(compiled, **size, output_shapes=shapes, output_dtypes=dtypes))

    def _checked(
        self,
        key: Hashable,
        prepare: Callable[[], Prepared],
        check: Callable[[], KernelCheck],
    ) -> Prepared:
        """What `prepare` makes for calls of this form, once a first call has passed its check.

        Raises `KernelCheckFailed` where the check fails, and `KernelError` for arguments that the
        kernel does not take.
        """
        prepared = self._known.get(key)
        if prepared is None:
            prepared = prepare()
            self._checks.ensure(check())
            self._known[key] = prepared
        return prepared


def kernel_name(*parts: str) -> str:
    """A kernel's name from its parts; empty ones are left out."""
    return "_".join(part for part in parts if part)


def in_device_memory(array: mx.array) -> mx.array:
    """The array, flat and with zeros up to 8 elements if it has fewer; else as it is.

    MLX passes smaller inputs as `const constant T*`, which does not convert to the
    `const device T*` of our functions. Only for inputs whose shape the kernel does not read.
    """
    if array.size >= FEWEST_ELEMENTS:
        return array
    return mx.pad(array.reshape(-1), (0, FEWEST_ELEMENTS - array.size))


def dtype_name(array: Any) -> str:
    """The dtype of an array for a message: `bfloat16`."""
    return str(array.dtype).split(".")[-1]
