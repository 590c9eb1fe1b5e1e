"""Which published drafter belongs to which target; the data is in registry.toml."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.resources import files

from .errors import ModelNotFoundError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Pair:
    """A drafter and every name its target is published under, the original first."""

    drafter: str
    targets: tuple[str, ...]


def pairs() -> list[Pair]:
    """All pairs of the registry."""
    text = files("dflash_mlx").joinpath("registry.toml").read_text(encoding="utf-8")
    return [Pair(row["drafter"], tuple(row["targets"])) for row in tomllib.loads(text)["pair"]]


def drafter_for(name: str) -> str:
    """The drafter of a target, found by its repository or by the name of its local folder.

    Raises `ModelNotFoundError` when the registry has none.
    """
    last = name.rstrip("/").rpartition("/")[2].lower()
    for pair in pairs():
        if any(target.rpartition("/")[2].lower() == last for target in pair.targets):
            return pair.drafter
    raise ModelNotFoundError(
        f"No drafter is known for {name}: name one with draft= (--draft on the command line)."
    )
