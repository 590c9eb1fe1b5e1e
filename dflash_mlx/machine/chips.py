"""Bandwidth and peak speed of Apple's chips; the data is in chips.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from ..errors import SettingsError

BANDWIDTH_SHARE = 0.85  # of the memory bandwidth, reached when reading weights
TILE_SHARE = 0.65  # of the peak, reached by a 16-row tile


@dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        name: as Apple calls it, "M4 Max".
        generation: "M1" to "M5".
        bandwidth: bytes per second.
        flops: half-precision operations per second.
        stock_share: the part of `flops` that MLX's own 32-row tile reaches.
    """

    name: str
    generation: str
    bandwidth: float
    flops: float
    stock_share: float

    def reading(self, size: float) -> float:
        """Seconds to read `size` bytes."""
        return size / (self.bandwidth * BANDWIDTH_SHARE)

    def multiplying(self, rows: int, weights: float, share: float = TILE_SHARE) -> float:
        """Seconds to multiply `rows` rows by `weights` weights, at a share of the peak."""
        return 2 * rows * weights / (self.flops * share)


def chips() -> list[Chip]:
    """All known chips, the oldest first."""
    content = tomllib.loads(files("dflash_mlx.machine").joinpath("chips.toml").read_text("utf-8"))
    return [
        Chip(
            name=name,
            generation=(generation := name.partition(" ")[0]),
            bandwidth=row["bandwidth"] * 1e9,
            flops=row["tflops"] * 1e12,
            stock_share=content["stock_share"][generation],
        )
        for name, row in content["chip"].items()
    ]


def find_chip(name: str) -> Chip | None:
    """The chip called "M4 Max", "m4max" or, like MLX's device name, "Apple M4 Max"."""
    wanted = re.sub("^apple|[ -]", "", name.lower())
    return next((chip for chip in chips() if chip.name.lower().replace(" ", "") == wanted), None)


def chip_named(name: str) -> Chip:
    """Like `find_chip`, but raises `SettingsError` for an unknown name."""
    chip = find_chip(name)
    if chip is None:
        known = ", ".join(chip.name for chip in chips())
        raise SettingsError(f"Unknown chip {name!r}: choose one of {known}.")
    return chip
