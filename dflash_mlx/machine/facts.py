"""Hardware and software of this machine, recorded with every measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from .blas import BlasInfo

GB = 1e9


def computer() -> dict[str, str]:
    """Machine and software, without MLX."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "os": _system(),
        "memory": f"{memory_bytes() / GB:.0f} GB",
        "cores": str(_usable_cores()),
        "python": platform.python_version(),
        "dflash-mlx": installed("dflash-mlx") or "unknown",
    }


def machine(blas: BlasInfo) -> dict[str, str]:
    """`computer` with the device, the BLAS and the libraries that decode. Needs MLX."""
    import mlx.core as mx

    device = str(mx.default_device().type).rpartition(".")[2]
    libraries = ("mlx", "mlx-lm", "transformers", "numpy")
    return {
        "chip": str(mx.device_info().get("device_name", "unknown")),
        "device": "Metal" if device == "gpu" and mx.metal.is_available() else device.upper(),
        "blas": blas.name,
        **computer(),
        **{name: installed(name) or "unknown" for name in libraries},
    }


def memory_bytes() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _system() -> str:
    """Name and version of the operating system."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _usable_cores() -> int | None:
    """Number of cores that this process may run on: fewer when it is pinned."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
