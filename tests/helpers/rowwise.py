"""A quick BLAS under MLX for the tests, whose rows do not depend on how many there are.

What is compared bit by bit here needs such rows, and sums that do not depend on how weights lie in
memory. The reference BLAS in MLX's Linux wheel has both and is slow; OpenBLAS, on which people run,
is quick and has neither.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def use_rowwise_blas() -> None:
    """Put `rowwise.c` under MLX, before MLX is imported; without a C compiler MLX keeps its own."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        return
    assert "mlx.core" not in sys.modules, "MLX has chosen its BLAS already"
    with TemporaryDirectory() as folder:
        library = Path(folder) / "rowwise.so"
        command = [compiler, "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared"]
        subprocess.run([*command, Path(__file__).with_suffix(".c"), "-o", library], check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
