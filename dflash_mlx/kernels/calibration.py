"""What `dflash-mlx tune` measured on this machine: it overrules the table.

One small file for the chip, the version of MLX and the text of our kernels: another of any of them
starts anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from ..machine.folders import cache_folder

GAIN = 0.98  # of stock's time: what is less of a gain may be chance, and stock stays


@dataclass(frozen=True)
class Timing:
    """Seconds of one product, rows -> seconds, with MLX's kernel and with ours."""

    stock: Mapping[int, float]
    ours: Mapping[int, float]

    @property
    def first_row(self) -> int | None:
        """The fewest rows from which ours wins at every number that was measured; None if never."""
        first = None
        for rows in sorted(self.stock, reverse=True):
            if self.ours[rows] > GAIN * self.stock[rows]:
                break
            first = rows
        return first


def read_timings() -> dict[str, Timing]:
    """The timings of this machine, by `Matrix.key`; none where nothing was measured."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
        return {
            key: Timing(*({int(r): float(s) for r, s in timing[way].items()} for way in _WAYS))
            for key, timing in content.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # never measured, or not readable: measuring mends both


def store_timings(timings: Mapping[str, Timing]) -> Path:
    """Add timings to this machine's. Raises `OSError` where the folder cannot be written."""
    every = read_timings() | dict(timings)
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {key: {"stock": one.stock, "ours": one.ours} for key, one in every.items()}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def choices(timings: Mapping[str, Timing]) -> dict[str, int | None]:
    """The rows from which ours runs, by `Matrix.key`."""
    return {key: timing.first_row for key, timing in timings.items()}


_WAYS = ("stock", "ours")


def _file() -> Path:
    sources = sorted(
        path.read_text("utf-8")
        for path in files("dflash_mlx.metal").iterdir()
        if path.name.endswith((".metal", ".h"))
    )
    chip = str(mx.device_info().get("device_name", ""))
    name = hashlib.sha256(repr([chip, version("mlx"), sources]).encode()).hexdigest()[:16]
    return cache_folder("kernels") / f"{name}.json"
