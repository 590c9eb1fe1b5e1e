"""Draft trees in one forward: every node sees its ancestors and no other branch.

mlx-lm's models get what depends on a row's position from outside: the attention mask from the
cache, the rotation of queries and keys from the `rope` module, and a few get a factor for each
query from a function. While a tree is verified, the caches return the ancestor mask
(`caches.row_cache`), and `rope` and that function take a row's depth for its number (`intercept`).
Recurrent layers read trees in `mixers`. Here is which layers cannot.
"""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import mlx.nn as nn

from ..subclassing import stock_class
from .caches import RecurrentCache
from .internals import ROPES, attention_of, masks_itself, uses_no_positions


def why_no_trees(layer: nn.Module | None, cache: Any) -> str | None:
    """What keeps a decoder layer from reading trees; None when it can.

    `cache` is the layer's, a `DraftCache`, or None where it has none of its own.
    """
    if isinstance(cache, RecurrentCache):
        return None
    name = f"a {type(layer).__name__}"
    own_masks = cache is not None and not cache.reads_trees
    if layer is None or own_masks or masks_itself(layer):
        return f"{name} that makes its own masks"
    if cache is None and attention_of(layer) is None:
        return None  # nothing in it looks at other rows
    rotations = ropes(layer)
    names = [type(rope).__name__ for rope in rotations]
    unknown = [name for name in names if name not in ROPES]
    unknown += [name for part in layer.modules() for name in _other_rotations(stock_class(part))]
    if unknown:
        return f"positions by {unknown[0]}"
    return None if rotations or uses_no_positions(layer) else f"{name} without a rope"


def ropes(layer: nn.Module) -> list[nn.Module]:
    """The rotations in a decoder layer; an indexer has one of its own."""
    return [part for path, part in layer.named_modules() if path.rpartition(".")[2] == "rope"]


def _other_rotations(kind: type) -> list[str]:
    """The names by which a module's own code rotates rows otherwise than by `rope`."""
    names: set[str] = set()
    for name, member in vars(kind).items():
        if isfunction(member) and name != "__init__":
            names.update(member.__code__.co_names)
    return sorted(name for name in names - {"rope", "use_rope"} if name.endswith("rope"))
