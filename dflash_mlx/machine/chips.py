"""Bandwidth and peak speed of Apple's chips; the data is in chips.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from ..errors import SettingsError

BANDWIDTH_SHARE = 0.85  # of the memory bandwidth, reached when reading weights


@dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        name: as Apple calls it, "M4 Max".
        generation: "M1" to "M5".
        bandwidth: bytes per second.
        flops: half-precision operations per second.
        stock_share: the part of `flops` that MLX's own 32-row tile reaches.
        tile_share: the part of `flops` that a 16-row tile reaches.
        launch: seconds that the GPU takes to start a kernel.
    """

    name: str
    generation: str
    bandwidth: float
    flops: float
    stock_share: float
    tile_share: float
    launch: float

    def read_seconds(self, size: float) -> float:
        """Seconds to read `size` bytes."""
        return size / (self.bandwidth * BANDWIDTH_SHARE)

    def multiply_seconds(self, rows: int, weights: float, share: float | None = None) -> float:
        """Seconds to multiply `rows` rows by `weights` weights, at a share of the peak."""
        return 2 * rows * weights / (self.flops * (share or self.tile_share))


def chips() -> list[Chip]:
    """All known chips, the oldest first."""
    content = tomllib.loads(files("dflash_mlx.machine").joinpath("chips.toml").read_text("utf-8"))
    all_chips = []
    for name, values in content["chip"].items():
        generation = name.partition(" ")[0]
        row = content["generation"][generation] | values
        chip = Chip(
            name=name,
            generation=generation,
            bandwidth=row["bandwidth"] * 1e9,
            flops=row["tflops"] * 1e12,
            stock_share=row["stock_share"],
            tile_share=row["tile_share"],
            launch=row["launch"] * 1e-6,
        )
        all_chips.append(chip)
    return all_chips


def find_chip(name: str) -> Chip | None:
    """The chip called "M4 Max", "m4max" or, like MLX's device name, "Apple M4 Max"."""
    wanted = re.sub("^apple|[ -]", "", name.lower())
    for chip in chips():
        if chip.name.lower().replace(" ", "") == wanted:
            return chip
    return None


def chip_named(name: str) -> Chip:
    """Like `find_chip`, but raises `SettingsError` for an unknown name."""
    chip = find_chip(name)
    if chip is None:
        names = ", ".join(chip.name for chip in chips())
        raise SettingsError(f"Unknown chip {name!r}: choose one of {names}.")
    return chip
