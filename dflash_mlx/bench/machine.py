"""What a measurement was made on: without it no number can be compared with another."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from ..blas import BlasInfo


def machine(blas: BlasInfo) -> dict[str, str]:
    """The machine, the software and the BLAS, each in a word or two. Needs MLX."""
    import mlx.core as mx

    device = str(mx.default_device().type).rpartition(".")[2]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "chip": str(mx.device_info().get("device_name", "unknown")),
        "cores": str(_usable_cores()),
        "device": "Metal" if device == "gpu" and mx.metal.is_available() else device.upper(),
        "blas": blas.name,
        "python": platform.python_version(),
        "dflash-mlx": installed("dflash-mlx") or "unknown",
        "mlx": installed("mlx") or "unknown",
        "mlx-lm": installed("mlx-lm") or "unknown",
    }


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
