"""Links between machines, as far as a sum's cost depends on them; the data is in links.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from ..errors import SettingsError

RING, JACCL = "ring", "jaccl"


@dataclass(frozen=True)
class Link:
    """One kind of cable and what is spoken over it.

    Attributes:
        name: as `--link` says it.
        title: for people.
        backend: of MLX; `RING` passes parts around, in `JACCL`'s mesh each has a cable to each.
        step: seconds until a small message is there.
        bandwidth: bytes per second in one direction.
        source: where these come from, or that they are assumed.
    """

    name: str
    title: str
    backend: str
    step: float
    bandwidth: float
    source: str

    def summing(self, size: float, machines: int) -> float:
        """Seconds of a sum of so many bytes over so many machines; alone it takes none."""
        if machines == 1:
            return 0.0
        if self.backend == JACCL:
            return self.step + size / self.bandwidth
        return 2 * (machines - 1) * (self.step + size / machines / self.bandwidth)

    def gathering(self, size: float, machines: int) -> float:
        """Seconds until each of several machines has all parts, so many bytes together."""
        part = self.step + size / machines / self.bandwidth
        return part if self.backend == JACCL else (machines - 1) * part


def links() -> list[Link]:
    """All links that are known, the one to wish for first."""
    content = tomllib.loads(files("dflash_mlx.machine").joinpath("links.toml").read_text("utf-8"))
    return [
        Link(
            name=name,
            title=row["title"],
            backend=row["backend"],
            step=row["step_us"] / 1e6,
            bandwidth=row["bandwidth"] * 1e9,
            source=row["source"],
        )
        for name, row in content["link"].items()
    ]


def link_named(name: str) -> Link:
    """The link of this name. Raises `SettingsError` for one that is not known."""
    known = {link.name: link for link in links()}
    if name not in known:
        raise SettingsError(f"No link {name!r} is known: {', '.join(known)} are.")
    return known[name]
