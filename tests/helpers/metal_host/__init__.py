"""Metal kernels on the CPU: sources for `mx.fast.metal_kernel` are compiled as C++ and run.

    kernel.py       EmulatedKernel, the stand-in for mx.fast.metal_kernel
    wrapper.py      the text that MLX writes around a kernel's body, and the same as C++
    compiler.py     finds a compiler, compiles, and stores the compiled libraries
    strict.py       checks with clang for code that a Mac's compiler refuses or makes slow
    launch.py       a launch: buffers with red zones, and the findings
    include/        replacements for Metal's headers
    strict/         declarations of the same, with address spaces
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
