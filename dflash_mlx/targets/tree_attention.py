"""Draft trees in one forward: every node sees its ancestors and no other branch.

mlx-lm's models get what depends on a row's position from outside: the attention mask from the
cache, the rotation of queries and keys from the `rope` module, and a few get a factor for each
query from a function. During a tree's verify the caches return the ancestor mask (`caches.rows`),
and `rope` and that function take a row's depth for its number. So no family needs a forward of its
own. Recurrent layers read trees in `mixers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .caches import RecurrentCache
from .internals import (
    QUERY_SCALE,
    ROPES,
    attention_of,
    backbone,
    masks_itself,
    text_model,
    uses_no_positions,
)
from .overrides import Overrides, rebind_globals

AXES = 9  # of a batch's positions, so that nothing but `rotate_rows` can use them


def rotate_rows(
    model: nn.Module, layers: Sequence[nn.Module], overrides: Overrides, tree: Callable[[], Any]
) -> None:
    """Have a model rotate each row by its own position: in a tree, and in a batch.

    Args:
        model: the model.
        layers: its decoder layers.
        overrides: of such forwards, to which the rotations are added.
        tree: returns the `Tree` in the running forward; None if it is a batch's, whose offsets are
            positions already.
    """

    def by_row(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(rope: nn.Module, x: mx.array, offset: Any = 0, **settings: Any) -> mx.array:
            found, axes = tree(), offset.ndim if isinstance(offset, mx.array) else 0
            if found is None and axes != AXES:
                raise TypeError("The model does not rotate each row by its position.")
            positions = offset.flatten() if axes else offset + found.depths
            # Rows on the batch axis: there each may have its own position.
            rows = x if len(x) > 1 else x.swapaxes(0, -2)
            rotated = own(rope, rows, offset=positions, **settings)
            return rotated if len(x) > 1 else rotated.swapaxes(0, -2)

        return call

    for rope in {id(rope): rope for layer in layers for rope in ropes(layer)}.values():
        overrides.replace(rope, by_row(type(rope).__call__))
    inner = backbone(text_model(model))
    forward = type(inner).__call__
    if scale := getattr(forward, "__globals__", {}).get(QUERY_SCALE):
        # It returns factors [N, 1] for consecutive positions.
        by_depth = {QUERY_SCALE: lambda *args: scale(*args)[tree().depths]}
        overrides.replace(inner, rebind_globals(forward, **by_depth))


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
    found = ropes(layer)
    unknown = [type(rope).__name__ for rope in found if type(rope).__name__ not in ROPES]
    unknown += [name for part in layer.modules() for name in _other_rotations(type(part))]
    if unknown:
        return f"positions by {unknown[0]}"
    return None if found or uses_no_positions(layer) else f"{name} without a rope"


def ropes(layer: nn.Module) -> list[nn.Module]:
    """The rotations in a decoder layer; an indexer has one of its own."""
    return [part for path, part in layer.named_modules() if path.rpartition(".")[2] == "rope"]


def _other_rotations(kind: type) -> list[str]:
    """The names by which a module's own code rotates rows otherwise than by `rope`."""
    code = (vars(kind)[name].__code__ for name in vars(kind) if isfunction(vars(kind)[name]))
    names = {name for one in code if one.co_name != "__init__" for name in one.co_names}
    return sorted(name for name in names - {"rope", "use_rope"} if name.endswith("rope"))
