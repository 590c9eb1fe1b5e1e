"""Proof that a launch gives what its reference gives on this device, before it is used.

The kernels were developed on an emulator and meet a real GPU on the user's machine. So a launch of
a form that has not run here before is first made with random rows, the model's own weights and
shapes, and compared with its reference in plain MLX. What fails is left to MLX; the others run.
Every kernel's module has the check beside the kernel and its reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass

import mlx.core as mx

from ..errors import KernelError

# Relative to the largest value: a few roundings of the result and of float32 sums of length K.
TOLERANCES = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2, mx.float32: 1e-4}


class UnprovenError(KernelError):
    """A launch failed its check on this device: MLX's kernel runs in its place."""


@dataclass(frozen=True)
class KernelCheck:
    """One call of a kernel, and its expected result.

    Attributes:
        key: which launches it is for, in words: what they multiply or read, and how many rows.
        ours, reference: return arrays of the same shapes; the reference's are float32.
    """

    key: str
    ours: Callable[[], list[mx.array]]
    reference: Callable[[], list[mx.array]]


def fault_of(check: KernelCheck) -> str | None:
    """How a call fails: it does not run, or its result differs. None if it passes."""
    try:
        results = check.ours()
        mx.eval(results)
    except (RuntimeError, ValueError, KernelError) as error:  # the compiler's, and of limits
        return f"does not run ({_said(error.__cause__ or error)})"
    for result, reference in zip(results, check.reference(), strict=True):
        if result.shape != reference.shape:
            return f"gives {result.shape} instead of {reference.shape}"
        difference = mx.abs(result.astype(mx.float32) - reference).max()
        allowed = TOLERANCES[result.dtype] * mx.abs(reference).max()
        if not mx.less_equal(difference, allowed).item():  # with a NaN, too
            return f"differs from its reference by {difference.item():.2g}"
    return None


def _said(error: BaseException) -> str:
    """A message's first line with an error of the compiler, or its first line."""
    lines = str(*error.args[:1]).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0]).strip()[:200]


class Proofs:
    """The launches that passed their check, shared by a model's kernels.

    Attributes:
        proven: their keys; None where nothing is checked.
        broken: what failed here, by key.
        strict: whether what fails is an error: exact decoding runs on our kernels or not at all.
        keep: called with new keys.
    """

    strict = False

    def __init__(self) -> None:
        self.proven: set[str] | None = None
        self.broken: dict[str, str] = {}
        self.keep: Callable[[Collection[str]], None] = lambda proven: None

    def require(self, check: KernelCheck) -> None:
        """Make the check, if this launch was never made. Raises `UnprovenError` if it fails."""
        if self.proven is None or check.key in self.proven:
            return
        if check.key not in self.broken:
            fault = fault_of(check)
            if fault is None:
                self.proven.add(check.key)
                self.keep([check.key])
                return
            self.broken[check.key] = f"{check.key} {fault}"
            if not self.strict:
                warnings.warn(
                    "dflash-mlx: a kernel of ours is broken here and left out: "
                    f"{self.broken[check.key]}. Please report this.",
                    stacklevel=2,
                )
        problem = self.broken[check.key]
        if self.strict:
            raise KernelError(
                f"Exact decoding needs our kernels: {problem}. Load with kernels=off (--kernels "
                "off on the command line), and please report this."
            )
        raise UnprovenError(problem)


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
