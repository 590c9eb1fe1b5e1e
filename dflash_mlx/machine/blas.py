"""Put a fast BLAS under MLX on Linux, before MLX is imported.

MLX's Linux wheel bundles the reference BLAS, whose cost is linear in the number of rows: verifying
16 rows costs 16 times one row, so drafting saves nothing. MLX looks `cblas_sgemm` up by name, and a
library that was loaded globally before it answers first. Nothing is patched, and MLX's own files
stay as they are.

The first of these is used: `blas_shim.c`, which is compiled once for this processor into
~/.cache/dflash-mlx (or at every start if that folder cannot be written); an OpenBLAS of the system;
the stock BLAS. On macOS MLX uses Accelerate and nothing is done.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from ..errors import SettingsError

_OPENBLAS = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")  # p: Fedora's threaded
_COMPILERS = ("cc", "gcc", "clang")
_X86_KERNELS = {"avx512": ("avx512f", "avx512vl", "fma"), "avx2": ("avx2", "fma")}


@dataclass(frozen=True)
class BlasInfo:
    """Which BLAS does MLX's matrix products on the CPU, and why that one.

    Attributes:
        name: "dflash-avx512", "-avx2", "-neon" or "-generic" (this package's, by the vectors it
            uses), "openblas" (the system's), "accelerate", "preloaded" (loaded globally before) or
            "stock" (MLX's own).
        path: the library's file, where this module loaded one.
        reason: why this BLAS, in one line.
        flushes_denormals: whether MLX's threads treat denormal numbers as zero.
    """

    name: str
    path: str | None
    reason: str
    flushes_denormals: bool = False


def use_fast_blas(stock: bool = False, threads: int = 1, flush_denormals: bool = False) -> BlasInfo:
    """Put the best BLAS of this machine under MLX. Call it before anything imports MLX.

    If no fast BLAS can be found or built, MLX keeps its own and `reason` says why.

    Args:
        stock: keep MLX's own BLAS.
        threads: threads per matrix product.
        flush_denormals: treat denormal numbers as zero on every thread where MLX multiplies
            matrices. Training needs it (denormals made it 7 times slower); decoding does not, and
            without it the arithmetic is IEEE's.

    Raises:
        SettingsError: MLX is already imported with its own BLAS (Linux only), or `threads` is not
            a whole number, 1 or more.
    """
    if not isinstance(threads, Integral) or isinstance(threads, bool) or threads < 1:
        raise SettingsError("threads must be a whole number, 1 or more: give it, or leave it out.")
    if sys.platform == "darwin":
        return BlasInfo("accelerate", None, "MLX uses Apple's Accelerate on macOS")
    if sys.platform != "linux":
        return BlasInfo("stock", None, f"no other BLAS is known for {sys.platform}")
    if hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return BlasInfo("preloaded", None, "a cblas_sgemm was loaded globally before this call")
    if stock:
        return BlasInfo("stock", None, "chosen by the caller")
    if "mlx.core" in sys.modules:
        raise SettingsError(
            "MLX is already imported and keeps its BLAS: call use_fast_blas() before any import "
            "that needs mlx."
        )
    try:
        kernel, flags = _kernel()
        with _shim(kernel, flags) as path:
            shim = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (_NoShim, OSError) as error:
        return _system_openblas(threads, f"dflash-mlx's own is not used: {error}")
    flushes = bool(shim.dflash_configure(int(threads), int(flush_denormals)))
    return BlasInfo(f"dflash-{kernel}", str(path), "built for this processor", flushes)


def _system_openblas(threads: int, why: str) -> BlasInfo:
    """Load an OpenBLAS of this system globally, if MLX can call it as it is."""
    for name in _OPENBLAS:
        try:
            library = ctypes.CDLL(name)
            library.openblas_get_config.restype = ctypes.c_char_p
            if b"USE64BITINT" not in library.openblas_get_config():
                library.openblas_set_num_threads(int(threads))
                ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
                return BlasInfo("openblas", library._name, f"found on this system; {why}")
        except (OSError, AttributeError):
            continue
    return BlasInfo("stock", None, f"there is no OpenBLAS on this system; {why}")


class _NoShim(Exception):
    """The shim cannot be built; the message says why."""


def _kernel() -> tuple[str, list[str]]:
    """The vectors that this processor has, and the compiler's options for them."""
    if platform.machine() == "aarch64":
        return "neon", []
    try:
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    there = found[1].split() if found else []
    for name, needed in _X86_KERNELS.items():
        if set(needed) <= set(there):
            return name, [f"-m{flag}" for flag in needed]
    return "generic", []


@contextmanager
def _shim(kernel: str, flags: list[str]) -> Iterator[Path]:
    """The compiled shim, from the user's cache folder; built if missing.

    If the folder cannot be written, it is built for this process only.
    """
    source = Path(__file__).with_name("blas_shim.c").read_bytes()
    version = hashlib.sha256(source).hexdigest()[:16]
    name = f"shim-{platform.machine()}-{kernel}-{version}.so"
    with ExitStack() as stack:
        try:
            path = Path.home() / ".cache" / "dflash-mlx" / "blas" / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                _compile(source, flags, path)
        except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / name
            _compile(source, flags, path)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise _NoShim(f"others can write the shim {path} (delete it)")
        yield path


def _compile(source: bytes, flags: list[str], path: Path) -> None:
    """Compile `source` into the shared library `path`, atomically."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise _NoShim("there is no C compiler (install gcc)")
    # Two processes may build at once, so each has a temporary name; the last one's file stays.
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    built = Path(name)
    command = [compiler, "-O2", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread", *flags]
    command += ["-x", "c", "-", "-o", name]
    try:
        subprocess.run(command, input=source, capture_output=True, check=True, timeout=60)
        built.chmod(0o700)
        built.replace(path)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise _NoShim(f"{compiler} fails to build the shim: {lines[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise _NoShim(f"{compiler} did not finish in 60 s") from error
    finally:
        built.unlink(missing_ok=True)
