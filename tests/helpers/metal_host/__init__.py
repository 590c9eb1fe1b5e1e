"""Metal kernels on the CPU: the sources that `mx.fast.metal_kernel` takes, compiled as C++ and run.

    kernel.py       EmulatedKernel, the stand-in for mx.fast.metal_kernel
    wrapper.py      the function that MLX writes around a kernel's body, letter for letter; as C++
    compiler.py     finding a compiler, compiling, keeping what has been compiled
    strict.py       what a Mac's compiler refuses or makes slow, asked of clang
    launch.py       the call: buffers with red zones, findings
    include/        stand-ins for Metal's headers
    strict/         the same as declarations, with address spaces
    runtime/        fibers for threads, barriers, SIMD-group functions, the checks
    samples.py      a small kernel that the emulator's own tests run

Tests that need it say `pytestmark = metal_host.needs_compiler`, so that a machine without a
compiler skips them and says why.
"""

import pytest

from metal_host.compiler import CompilationError, find_compiler
from metal_host.kernel import EmulatedKernel
from metal_host.launch import CheckError, Finding

__all__ = [
    "CheckError",
    "CompilationError",
    "EmulatedKernel",
    "Finding",
    "needs_compiler",
]

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="no compiler to emulate Metal with: g++ 12 or later, on Linux"
)
