"""Checks that a kernel launch returns what its reference returns on this device, before its use.

The kernels were developed on an emulator and meet a real GPU only on the user's machine. So before
a launch of a new form runs, it is made with random rows and the model's weights and shapes, and
compared with its reference in plain MLX. If it fails, MLX's kernel runs instead. Each kernel's
module contains its check, next to the kernel and its reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass

import mlx.core as mx

from ..errors import KernelError

# Relative to the largest value: a few roundings of the result and of float32 sums of length K.
TOLERANCES = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2, mx.float32: 1e-4}


class KernelCheckFailed(KernelError):
    """A launch failed its check on this device, so MLX's kernel runs instead."""


@dataclass(frozen=True)
class KernelCheck:
    """One call of a kernel, and its expected result.

    Attributes:
        key: describes the launches that it covers: what they multiply or read, and how many rows.
        ours: returns the results of the kernel.
        reference: returns the expected results, in float32 and with the same shapes.
    """

    key: str
    ours: Callable[[], list[mx.array]]
    reference: Callable[[], list[mx.array]]


def find_fault(check: KernelCheck) -> str | None:
    """How a call fails: it does not run, or its results differ. None if it passes."""
    try:
        results = check.ours()
        mx.eval(results)
    except (RuntimeError, ValueError, KernelError) as error:  # of Metal's compiler or its limits
        return f"does not run ({_error_line(error.__cause__ or error)})"
    for result, reference in zip(results, check.reference(), strict=True):
        if result.shape != reference.shape:
            return f"gives {result.shape} instead of {reference.shape}"
        difference = mx.abs(result.astype(mx.float32) - reference).max()
        allowed = TOLERANCES[result.dtype] * mx.abs(reference).max()
        if not mx.less_equal(difference, allowed).item():  # also fails for NaN
            return f"differs from its reference by {difference.item():.2g}"
    return None


def _error_line(error: BaseException) -> str:
    """The line of a message with the first compiler error; its first line if there is none."""
    lines = str(*error.args[:1]).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0]).strip()[:200]


class KernelChecks:
    """The checks that passed or failed on this device, shared by the kernels of a model.

    Attributes:
        passed: the keys of checks that passed; None if nothing is to be checked.
        failed: what is wrong with the launches that failed, by key.
        must_pass: whether a failed check is an error. Exact decoding cannot use MLX's kernels.
        on_pass: called with the keys of checks that have just passed.
    """

    must_pass = False

    def __init__(self) -> None:
        self.passed: set[str] | None = None
        self.failed: dict[str, str] = {}
        self.on_pass: Callable[[Collection[str]], None] = lambda passed: None

    def ensure(self, check: KernelCheck) -> None:
        """Run a check unless its result is known. Raises `KernelCheckFailed` if it fails."""
        if self.passed is None or check.key in self.passed:
            return
        if check.key not in self.failed:
            fault = find_fault(check)
            if fault is None:
                self.passed.add(check.key)
                self.on_pass([check.key])
                return
            self.failed[check.key] = f"{check.key} {fault}"
            if not self.must_pass:
                warnings.warn(
                    "dflash-mlx: a kernel of ours is broken here and left out: "
                    f"{self.failed[check.key]}. Please report this.",
                    stacklevel=2,
                )
        problem = self.failed[check.key]
        if self.must_pass:
            raise KernelError(
                f"Exact decoding needs our kernels: {problem}. Load with kernels=off (--kernels "
                "off on the command line), and please report this."
            )
        raise KernelCheckFailed(problem)


class Noise:
    """Random arrays of one dtype, different in every call."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype = dtype
        self._key = mx.random.key(0)

    def __call__(self, *shape: int) -> mx.array:
        """Values of a normal distribution."""
        self._key, key = mx.random.split(self._key)
        return mx.random.normal(shape, key=key).astype(self.dtype)

    def gates(self, *shape: int) -> mx.array:
        """Values between 0 and 1, in float32."""
        return mx.sigmoid(self(*shape).astype(mx.float32))
