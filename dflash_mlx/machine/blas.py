"""Put a fast BLAS under MLX on Linux, before MLX is imported.

MLX's Linux wheel bundles the reference BLAS, whose cost is linear in the number of rows: verifying
16 rows costs 16 times one row, so drafting saves nothing. MLX looks `cblas_sgemm` up by name, and a
library that was loaded globally before it answers first. Nothing is patched, and MLX's own files
stay as they are.

The first of these is used: an OpenBLAS of the system; the OpenBLAS inside numpy, reached through
`blas_shim.c`, which is compiled once into ~/.cache/dflash-mlx (or at every start if that folder
cannot be written); the stock BLAS. On macOS MLX uses Accelerate and nothing is done.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from ..errors import SettingsError

_SYSTEM_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")  # p: Fedora's threaded
_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True)
class BlasInfo:
    """Which BLAS does MLX's matrix products on the CPU, and why that one.

    Attributes:
        name: "openblas" (the system's), "numpy-openblas", "accelerate", "preloaded" (loaded
            globally before) or "stock" (MLX's own).
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
        threads: threads per matrix product. With numpy's OpenBLAS this applies to numpy, too.
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
    if has_fast_blas():
        return BlasInfo("preloaded", None, "a cblas_sgemm was loaded globally before this call")
    if stock:
        return BlasInfo("stock", None, "chosen by the caller")
    if "mlx.core" in sys.modules:
        raise SettingsError(
            "MLX is already imported and keeps its BLAS: call use_fast_blas() before any import "
            "that needs mlx."
        )
    system = _system_openblas()
    if system is not None:
        return _use_system(system, threads, flush_denormals)
    return _use_numpy(threads, flush_denormals)


def has_fast_blas() -> bool:
    """Whether matrix products on this CPU cost far less per row than one row alone."""
    return sys.platform != "linux" or hasattr(ctypes.CDLL(None), "cblas_sgemm")


class _NoShim(Exception):
    """The shim cannot be built or loaded; the message says why."""


def _use_system(library: ctypes.CDLL, threads: int, flush_denormals: bool) -> BlasInfo:
    library.openblas_set_num_threads(threads)
    path, reason = library._name, "found on this system"
    if flush_denormals:
        try:
            flushes = _route("int", library.cblas_sgemm, library.cblas_dgemm, True)
            return BlasInfo("openblas", path, reason, flushes)
        except _NoShim as error:
            reason += f"; denormals are not flushed: {error}"
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return BlasInfo("openblas", path, reason)


def _use_numpy(threads: int, flush_denormals: bool) -> BlasInfo:
    library = _numpy_openblas()
    if library is None:
        return BlasInfo("stock", None, "no OpenBLAS on this system or in numpy (install one)")
    sgemm, dgemm = library.scipy_cblas_sgemm64_, library.scipy_cblas_dgemm64_
    try:
        flushes = _route("int64_t", sgemm, dgemm, flush_denormals)
    except _NoShim as error:
        return BlasInfo("stock", None, f"no OpenBLAS on this system; numpy's is unused: {error}")
    library.scipy_openblas_set_num_threads64_(threads)
    return BlasInfo("numpy-openblas", library._name, "bundled with numpy", flushes)


def _system_openblas() -> ctypes.CDLL | None:
    """The system's OpenBLAS with 32-bit sizes, which MLX can call directly."""
    for name in _SYSTEM_NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        needed = ("cblas_sgemm", "cblas_dgemm", "openblas_set_num_threads", "openblas_get_config")
        if not all(hasattr(library, function) for function in needed):
            continue
        library.openblas_get_config.restype = ctypes.c_char_p
        if b"USE64BITINT" not in library.openblas_get_config():
            return library
    return None


def _numpy_openblas() -> ctypes.CDLL | None:
    """The OpenBLAS inside numpy's wheel, with 64-bit sizes and prefixed names; None without."""
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return None
    libraries = Path(numpy.origin).parents[1] / "numpy.libs"
    needed = ("scipy_cblas_sgemm64_", "scipy_cblas_dgemm64_", "scipy_openblas_set_num_threads64_")
    for path in sorted(libraries.glob("libscipy_openblas64_*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        if all(hasattr(library, function) for function in needed):
            return library
    return None


def _route(blas_int: str, sgemm: Any, dgemm: Any, flush_denormals: bool) -> bool:
    """Load the shim globally, forwarding to these functions; returns whether denormals flush."""
    try:
        with _shim(blas_int) as path:
            shim = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _NoShim(f"the shim does not load ({error})") from error
    addresses = (ctypes.cast(function, ctypes.c_void_p) for function in (sgemm, dgemm))
    return bool(shim.dflash_route(*addresses, int(flush_denormals)))


@contextmanager
def _shim(blas_int: str) -> Iterator[Path]:
    """The compiled shim, from the user's cache folder; built if missing.

    If the folder cannot be written, it is built for this process only.
    """
    source = Path(__file__).with_name("blas_shim.c").read_bytes()
    version = hashlib.sha256(source + blas_int.encode()).hexdigest()[:16]
    name = f"shim-{platform.machine()}-{version}.so"
    with ExitStack() as stack:
        try:
            path = Path.home() / ".cache" / "dflash-mlx" / "blas" / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                _compile(source, blas_int, path)
        except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / name
            _compile(source, blas_int, path)
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise _NoShim(f"others can write the shim {path} (delete it)")
        yield path


def _compile(source: bytes, blas_int: str, path: Path) -> None:
    """Compile `source` into the shared library `path`, atomically."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise _NoShim("there is no C compiler (install gcc)")
    # Two processes may build at once, so each has a temporary name; the last one's file stays.
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    built = Path(name)
    command = [compiler, "-O2", "-fPIC", "-shared", f"-DBLAS_INT={blas_int}"]
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
