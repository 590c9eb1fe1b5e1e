"""Hardware, software and folders of this machine."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..validation import path_kind
from .blas import BlasInfo

GB = 1e9
BUSY = 0.75  # processes per core that run or want to, over the last minute
DISTRIBUTION = "dflash-lossless"  # what pip calls this package


def computer() -> dict[str, str]:
    """Machine and software, recorded with every measurement, without MLX."""
    pinned = hasattr(os, "sched_getaffinity")  # not on macOS
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "os": _system(),
        "memory": f"{memory_bytes() / GB:.0f} GB",
        "cores": str(len(os.sched_getaffinity(0)) if pinned else os.cpu_count()),
        "python": platform.python_version(),
        "dflash-mlx": installed(DISTRIBUTION) or "unknown",
    }


def machine(blas: BlasInfo) -> dict[str, str]:
    """`computer` with the device, the BLAS and the libraries that decode. Needs MLX."""
    import mlx.core as mx

    gpu = "Metal" if mx.metal.is_available() else "CUDA"
    libraries = ("mlx", "mlx-lm", "transformers", "numpy")
    return {
        "chip": str(mx.device_info().get("device_name", "unknown")),
        "device": "CPU" if mx.default_device() == mx.cpu else gpu,
        "blas": blas.name,
        **computer(),
        **{name: installed(name) or "unknown" for name in libraries},
    }


def busy() -> str:
    """A warning if programs keep most of this machine's cores busy; empty if they do not."""
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    if load < BUSY * cores:
        return ""
    counted = "1 core" if cores == 1 else f"{cores} cores"
    return f"The machine is busy (load {load:.1f} on {counted}): timings will be wrong."


def memory_bytes() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_bytes() -> int:
    """Bytes that models and their caches may take together.

    macOS recommends a working set for the GPU: 5.3 GiB of 8, 10.7 of 16, 21.3 of 32. Weights
    beyond it are paged in and out at every token. A CUDA card has memory of its own.
    """
    with suppress(ImportError):
        import mlx.core as mx

        gpu = mx.device_info()  # a CPU's has neither
        limit = gpu.get("max_recommended_working_set_size", gpu.get("total_memory"))
        return int(limit or memory_bytes())
    return memory_bytes()


def working_set(memory: float) -> float:
    """Bytes that macOS lets the GPU use of a Mac's memory: a share that grows beyond 32 GiB."""
    return memory * (2 / 3 if memory <= 32 * 2**30 else 3 / 4)


def _system() -> str:
    """Name and version of the operating system."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_folder(part: str) -> Path:
    """A subfolder of this platform's cache folder; it need not exist."""
    cache = Path("Library") / "Caches" if sys.platform == "darwin" else Path(".cache")
    try:
        return Path.home() / cache / "dflash-mlx" / part
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def bytes_in(folder: Path) -> int:
    """Total size of all files below a folder; 0 if it does not exist."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another program may have deleted it meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def nearest_there(folder: Path) -> Path:
    """The folder itself or its nearest existing parent: its disk and permissions count.

    Raises `OSError` as `path_kind`.
    """
    return next(path for path in (folder, *folder.parents) if path_kind(path) is not None)
