"""MLX without fused operations, on a CPU under Linux.

MLX joins elementwise operations (its own functions under `mx.compile`, such as `nn.silu`) into one
loop of C++, which it compiles with this machine's g++ when it is first used: a second each. Where
products and sums may be one instruction, gcc chooses for each loop which of them are. With gcc 16
an element had other bits in a loop over vectors than in its remainder, so a row's bits depended on
the rows before it. MLX can keep what it traces without joining anything. Its C++ header
`mlx/compile.h` has that mode; its Python module does not.
"""

from __future__ import annotations

import ctypes

NO_FUSE = 2  # of `mlx::core::CompileMode`
SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"  # mlx::core::set_compile_mode


def fuse_nothing() -> None:
    """Have MLX fuse no operations in this process from now on.

    If this MLX has no such mode, nothing is compiled at all: traced steps run in Python.
    """
    import mlx.core as mx

    library = ctypes.CDLL(mx.__file__)
    try:
        set_mode = getattr(library, SET_MODE)
    except AttributeError:
        mx.disable_compile()
        return
    set_mode.argtypes = [ctypes.c_int]
    set_mode.restype = None
    set_mode(NO_FUSE)
