"""Whether MLX's fused operations keep an element's bits wherever it lies, on a CPU under Linux.

MLX joins elementwise operations (its own functions under `mx.compile`, such as `nn.silu`) into one
loop of C++, which it compiles with this machine's g++. Where products and sums may be one
instruction, gcc chooses for each loop which of them are. With gcc 16 an element had other bits in a
loop over vectors than in its remainder, so a row's bits depended on the rows before it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys


def fusion_may_round() -> bool:
    """Whether g++ may fuse products and sums: on arm64, and where it builds for x86-64-v3.

    Compilers define `__FP_FAST_FMAF` for that. clang does not, and fuses within one statement only,
    where MLX's loops have a single operation.
    """
    compiler = shutil.which("g++") if sys.platform == "linux" else None
    if compiler is None:
        return False  # MLX does not fuse
    command = [compiler, "-dM", "-E", "-x", "c++", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    return "#define __FP_FAST_FMAF " in done.stdout
