"""What a measurement was made on: without it no number can be compared with another."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from .blas import BlasInfo

GB = 1e9


def computer() -> dict[str, str]:
    """The machine and its software, each in a word or two, as far as it is known without MLX."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "os": _system(),
        "memory": f"{memory_bytes() / GB:.0f} GB",
        "cores": str(_usable_cores()),
        "python": platform.python_version(),
        "dflash-mlx": installed("dflash-mlx") or "unknown",
    }


def machine(blas: BlasInfo) -> dict[str, str]:
    """The same with the device, the BLAS and the libraries that decode. Needs MLX."""
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
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _system() -> str:
    """The operating system with its version, as it names itself."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _usable_cores() -> int | None:
    """The cores this process may run on: fewer than there are when it is pinned."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def installed(package: str) -> str | None:
    """The version of an installed package; None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
