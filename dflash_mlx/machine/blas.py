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
_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "openblas_set_num_threads", "openblas_get_config")
_PLAIN = "{}"  # functions have their own names
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
    for name, path, spelling, reason in _openblas_libraries():
        try:
            library = ctypes.CDLL(path)
            sgemm, dgemm, set_threads, get_config = (
                getattr(library, spelling.format(function)) for function in _FUNCTIONS
            )
        except (OSError, AttributeError):
            continue
        get_config.restype = ctypes.c_char_p
        blas_int = "int64_t" if b"USE64BITINT" in get_config() else "int"
        fits, flushes = (spelling, blas_int) == (_PLAIN, "int"), False  # MLX can call it as it is
        if flush_denormals or not fits:
            try:
                flushes = _route(blas_int, sgemm, dgemm, flush_denormals)
            except _NoShim as error:
                if not fits:
                    return BlasInfo("stock", None, f"the OpenBLAS {reason} is unused: {error}")
                reason += f"; denormals are not flushed: {error}"
        if fits and not flushes:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        set_threads(threads)
        return BlasInfo(name, library._name, reason, flushes)
    return BlasInfo("stock", None, "no OpenBLAS on this system or in numpy (install one)")


def has_fast_blas() -> bool:
    """Whether matrix products on this CPU cost far less per row than one row alone."""
    return sys.platform != "linux" or hasattr(ctypes.CDLL(None), "cblas_sgemm")


class _NoShim(Exception):
    """The shim cannot be built or loaded; the message says why."""


def _openblas_libraries() -> Iterator[tuple[str, str, str, str]]:
    """Name, file, spelling of functions and place of every OpenBLAS that may be there."""
    for name in _SYSTEM_NAMES:
        yield "openblas", name, _PLAIN, "found on this system"
    numpy = importlib.util.find_spec("numpy")
    if numpy is not None and numpy.origin is not None:
        libraries = Path(numpy.origin).parents[1] / "numpy.libs"
        for path in sorted(libraries.glob("libscipy_openblas64_*")):
            yield "numpy-openblas", str(path), "scipy_{}64_", "bundled with numpy"


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
