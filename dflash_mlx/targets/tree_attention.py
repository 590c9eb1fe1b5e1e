"""Draft trees in one forward: every node sees its ancestors and no other branch.

mlx-lm's models get what depends on a row's position from outside: the attention mask from the
cache, the rotation of queries and keys from the `rope` module, and a few get a factor for each
query from a function. During a tree's verify the caches return the ancestor mask, and `rope` and
that function take a row's depth for its number. So no family needs a forward of its own. Layers
without keys read trees in `recurrent` and `deepseek_v41`.

A commit first writes the kept rows to the front, where a chain's rows would be; the rollback then
removes the rest. The rows come from the verify's own keys and values, not from the cache: a second
reference to the cache's array would make MLX copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isfunction
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedTreeError
from .caches import RowRollback, kind_of
from .internals import (
    QUERY_SCALE,
    ROPES,
    QuantizedKVCache,
    RotatingKVCache,
    attention_of,
    backbone,
    end_of_ring,
    hook,
    masks_itself,
    text_model,
    unhook,
    uses_no_positions,
)
from .overrides import Overrides, rebind_globals
from .tree import Tree


class TreeAttention:
    """Makes one request's caches and modules read trees during a forward.

    Args:
        model: the model.
        layers: the model's decoder layers.
        rollbacks: of the request's caches; those that record rows read trees by themselves.
        overrides: an empty set of overrides, to be installed after the verify's own.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        rollbacks: Sequence[Any],
        overrides: Overrides,
    ) -> None:
        self.overrides = overrides
        self.tree: Tree  # the one that is read, or was read last
        self._caches = [
            part for way in rollbacks if isinstance(way, RowRollback) for part in way.parts
        ]
        self._new: dict[int, tuple[mx.array, mx.array]] = {}  # keys and values of the last verify
        self._others = [way for way in rollbacks if not isinstance(way, RowRollback)]
        for rope in {id(rope): rope for layer in layers for rope in ropes(layer)}.values():
            overrides.replace(rope, self._by_depth(type(rope).__call__))
        inner = backbone(text_model(model))
        forward = type(inner).__call__
        if scale := getattr(forward, "__globals__", {}).get(QUERY_SCALE):
            rebound = rebind_globals(forward, **{QUERY_SCALE: self._scale_by_depth(scale)})
            overrides.replace(inner, rebound)

    @contextmanager
    def reading(self, tree: Tree) -> Iterator[None]:
        """Have the forward inside read this tree.

        Raises `UnsupportedTreeError` when it did not ask for a mask.
        """
        self.tree, self._masks = tree, 0
        for index, cache in enumerate(self._caches):
            hook(cache, self._mask_of(cache), self._recorder(index, cache.update_and_fetch))
        try:
            yield
        finally:
            for cache in self._caches:
                unhook(cache)
        if self._caches and not self._masks:
            raise UnsupportedTreeError("The target makes masks of its own: draft chains for it.")

    def move(self, kept: Sequence[int]) -> None:
        """Write the kept rows of the last tree, a path, before its other rows."""
        path = mx.array(list(kept))
        for index, cache in enumerate(self._caches):
            keys, values = self._new[index]
            write_rows(cache, keys[..., path, :], values[..., path, :], len(self.tree))
        for way in self._others:
            way.move(kept)

    def _mask_of(self, cache: Any) -> Callable[..., mx.array]:
        """The replacement of a cache's `make_mask`."""

        def make_mask(
            N: int, return_array: bool = False, window_size: int | None = None
        ) -> mx.array:
            self._masks += 1
            if not isinstance(cache, RotatingKVCache):
                return self.tree.mask(cache.offset, window_size)
            held = min(cache.offset, cache.max_size - 1)
            return self.tree.mask(held, window_size or cache.max_size)

        return make_mask

    def _recorder(self, index: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of a cache's `update_and_fetch`."""

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            self._new[index] = keys, values
            return own(keys, values)

        return update_and_fetch

    def _scale_by_depth(self, own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """The replacement of a function that returns factors [N, 1] for consecutive positions."""
        return lambda *args: own(*args)[self.tree.depths]

    def _by_depth(self, own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """A rotation of x [1, H, N, D] or [1, N, D] by the offset plus each row's depth."""

        def call(rope: nn.Module, x: mx.array, offset: Any = 0, **settings: Any) -> mx.array:
            if not isinstance(offset, mx.array) or not offset.ndim:
                offset = offset + self.tree.depths
            # Rows on the batch axis: there each may have its own position.
            return own(rope, x.swapaxes(0, -2), offset=offset, **settings).swapaxes(0, -2)

        return call


def why_no_trees(layer: nn.Module | None, rollback: Any) -> str | None:
    """What keeps a decoder layer from reading trees; None when it can.

    `rollback` is that of the layer's cache, or None where it has no cache of its own.
    """
    by_rows = isinstance(rollback, RowRollback)
    if rollback is not None and not by_rows:
        return None
    name = f"a {type(layer).__name__}"
    own = by_rows and any(kind_of(part).makes_masks for part in rollback.parts)
    if layer is None or own or masks_itself(layer):
        return f"{name} that makes its own masks"
    if rollback is None and attention_of(layer) is None:
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


def write_rows(cache: Any, keys: mx.array, values: mx.array, rows: int) -> None:
    """Write keys and values [1, H, n, D] over the first n of a cache's last `rows` rows."""
    end = end_of_ring(cache) if isinstance(cache, RotatingKVCache) else cache.offset
    to = slice(end - rows, end - rows + keys.shape[2])
    for held, new in ((cache.keys, keys), (cache.values, values)):
        if isinstance(cache, QuantizedKVCache):
            parts = mx.quantize(new, group_size=cache.group_size, bits=cache.bits)
            for held_part, part in zip(held, parts, strict=True):
                held_part[..., to, :] = part
        else:
            held[..., to, :] = new
