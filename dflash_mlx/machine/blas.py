"""Put a fast BLAS under MLX on Linux, before MLX is imported.

MLX's Linux wheel bundles the reference BLAS, whose cost is linear in the number of rows: verifying
16 rows costs 16 times one row, so drafting saves nothing. MLX looks `cblas_sgemm` up by name, and a
library that was loaded globally before it answers first. Nothing is patched, and MLX's own files
stay as they are.

The library is `blas_shim.c`, compiled once for this processor into ~/.cache/dflash-mlx (or at every
start if that folder cannot be written). Each load proves that no row of a product depends on the
other rows and that the bits are the same as on every other machine. If it cannot be built or fails,
MLX keeps its own BLAS. On macOS MLX uses Accelerate and nothing is done.
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

_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 300  # a limit; it takes 2, and 20 under an emulator
_X86_KERNELS = {
    "avx512": ("avx512f", "avx512vl", "fma"),
    "avx2": ("avx2", "fma"),
    "generic": ("fma",),
}
# The warning for users of the library who have not called `use_fast_blas`.
SLOW_PRODUCTS = (
    "dflash-mlx: MLX's own matrix products are slow for the several rows of a draft, so drafting "
    "may be slower than not drafting: call dflash_mlx.use_fast_blas() before anything imports MLX. "
    'If it returns the name "stock", its reason says what is missing.'
)


@dataclass(frozen=True)
class BlasInfo:
    """Which BLAS does MLX's matrix products on the CPU, and why that one.

    Attributes:
        name: "dflash-avx512", "-avx2", "-neon" or "-generic" (this package's, by the vectors it
            uses), "accelerate", "preloaded" (loaded globally before) or "stock" (MLX's own).
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

    If no fast BLAS can be built, MLX keeps its own and `reason` says why.

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
        raise SettingsError("threads must be a whole number, 1 or more, or left out.")
    if sys.platform == "darwin":
        return BlasInfo("accelerate", None, "MLX uses Apple's Accelerate on macOS")
    if sys.platform != "linux":
        return BlasInfo("stock", None, f"no other BLAS is known for {sys.platform}")
    if not has_stock_blas():
        from .blas_proof import dependent_rows

        reason = "a cblas_sgemm was loaded globally before this call"
        flaw = dependent_rows(ctypes.CDLL(None))
        return BlasInfo("preloaded", None, f"{reason}; {flaw}" if flaw else reason)
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
            shim = _proven(path)
    except (_NoShim, OSError) as error:
        return BlasInfo("stock", None, f"dflash-mlx's own is not used: {error}")
    flushes = bool(shim.dflash_configure(int(threads), int(flush_denormals)))
    reason = f"built for this processor by {_built_by(shim)}"
    return BlasInfo(f"dflash-{kernel}", path=str(path), reason=reason, flushes_denormals=flushes)


def has_stock_blas() -> bool:
    """Whether MLX multiplies on a CPU with the BLAS of its Linux wheel, slow for several rows."""
    return sys.platform == "linux" and not hasattr(ctypes.CDLL(None), "cblas_sgemm")


class _NoShim(Exception):
    """The shim cannot be used; the message says why."""


def _kernel() -> tuple[str, list[str]]:
    """The vectors that this processor has, and the compiler's options for them."""
    machine = platform.machine()
    if machine == "aarch64":
        return "neon", []
    if machine != "x86_64":
        return "generic", []  # which the compiler refuses if it would call a function for each fma
    # OSError, where there is no /proc, says so in the reason.
    flags_line = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    present = flags_line[1].split() if flags_line else []
    for name, needed in _X86_KERNELS.items():
        if set(needed) <= set(present):
            return name, [f"-m{flag}" for flag in needed]
    raise _NoShim("this processor has no fused multiply-add (FMA)")


@contextmanager
def _shim(kernel: str, flags: list[str]) -> Iterator[Path]:
    """The compiled shim, from the user's cache folder; built if missing.

    Its name contains a hash of the source and the compiler's version, so a new source or compiler
    builds a new one. If the folder cannot be written, it is built for this process only.
    """
    source = Path(__file__).with_name("blas_shim.c").read_bytes()
    stem = f"shim-{platform.machine()}-{kernel}-{hashlib.sha256(source).hexdigest()[:16]}"
    compiler = _compiler()
    version = _version(compiler) if compiler else "*"  # without a compiler, any shim serves
    with ExitStack() as stack:
        try:
            folder = Path.home() / ".cache" / "dflash-mlx" / "blas"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{stem}-{version}.so"
            built = next(folder.glob(path.name), None)
            if built is None:
                _compile(source, flags, path)
            else:
                path = built
        except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / f"{stem}.so"
            _compile(source, flags, path)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise _NoShim(f"others can write the shim {path} (delete it)")
        yield path


def _compiler() -> str | None:
    """The path of the first C compiler that there is."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def _version(compiler: str) -> str:
    """What `compiler` says of itself, as a part of a file's name."""
    first_line = _run([compiler, "--version"]).splitlines()[0]
    return re.sub(r"[^\w.+]+", "-", first_line).strip("-")[:80]


def _compile(source: bytes, flags: list[str], path: Path) -> None:
    """Compile `source` into the shared library `path`, atomically."""
    compiler = _compiler()
    if compiler is None:
        raise _NoShim("there is no C compiler (install gcc)")
    # Two processes may build at once, so each has a temporary name; the last one's file stays.
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    built = Path(name)
    command = [compiler, "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", *flags]
    command += ["-x", "c", "-", "-o", name]
    try:
        _run(command, source)
        built.chmod(0o700)
        built.replace(path)
    finally:
        built.unlink(missing_ok=True)


def _run(command: list[str], source: bytes = b"") -> str:
    """What a compiler prints, given `source`."""
    try:
        completed = subprocess.run(
            command, input=source, capture_output=True, check=True, timeout=_COMPILE_SECONDS
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        # gcc ends with a drawing of the line; the error itself comes first.
        message = next((line for line in lines if "error:" in line), lines[-1])
        raise _NoShim(f"{command[0]} fails to build the shim: {message.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise _NoShim(f"{command[0]} did not finish in {_COMPILE_SECONDS} s") from error
    return completed.stdout.decode(errors="replace")


def _proven(path: Path) -> ctypes.CDLL:
    """The library of `path`, loaded globally once its products are right."""
    from .blas_proof import dependent_rows, other_bits  # numpy: only where a library is loaded

    shim = ctypes.CDLL(str(path))
    flaw = dependent_rows(shim) or other_bits(shim)
    if flaw:
        raise _NoShim(
            f"{_built_by(shim)} built a wrong library: {flaw} (delete {path}, and please report "
            "this if the next one is wrong)"
        )
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _built_by(shim: ctypes.CDLL) -> str:
    """The compiler's name and version."""
    name = ctypes.c_char_p.in_dll(shim, "dflash_compiler").value
    return "an unknown compiler" if name is None else name.decode().strip()
