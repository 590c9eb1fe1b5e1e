"""Rejected rows leave a layer's cache, and draft trees enter it.

A cache with a row per token makes the mask for a tree's rows, and a commit first writes the kept
rows to the front, where a chain's rows would be. They come from the verify's own keys and values,
not from the cache: a second reference to the cache's array would make MLX copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from .caches import kind_of, leaves
from .internals import hook, unhook
from .tree import Tree


class Rollback(Protocol):
    """Removes rejected rows from one layer's cache, for one request."""

    def begin(self, tree: Tree | None) -> None:
        """Prepare for a verify of this tree, or of a chain."""

    def move(self, kept: Sequence[int]) -> None:
        """Put the rows of a tree's path in front, as those of a chain."""

    def commit(self, kept: int, rejected: int) -> None:
        """Leave the first `kept` rows of the last verify in the cache; some are rejected."""


def rollback_for(cache: Any, layer: nn.Module | None) -> Rollback | None:
    """The rollback of a layer's cache; None for an unknown kind of cache or of recurrence.

    Then the session goes back to a checkpoint, and the kept rows run again.

    Args:
        cache: the layer's cache, just made by the model.
        layer: the decoder layer.
    """
    parts = [part for _, part in leaves([cache])]
    if all([kind_of(part).cut for part in parts]):
        return RowRollback(parts)
    make = kind_of(cache).rollback
    return None if make is None or layer is None else make(cache, layer)


class RowRollback:
    """Rollback of a cache with a row per token: the last rows go, and chains record nothing.

    Args:
        parts: the cache, or those in a `CacheList`.

    Attributes:
        parts: as given.
        made_masks: how many masks the last tree's verify asked for.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.made_masks = parts, 0
        self._kinds = [kind_of(part) for part in parts]
        self._tree: Tree | None = None
        self._new: list[tuple[mx.array, mx.array]]  # keys and values of the last tree

    def begin(self, tree: Tree | None) -> None:
        """Have the caches read the tree, until `commit`."""
        self._tree, self.made_masks = tree, 0
        if tree is not None:
            self._new = [(mx.zeros(0), mx.zeros(0))] * len(self.parts)
            for at, part in enumerate(self.parts):
                hook(part, self._mask_of(part, tree), self._recorder(at, part.update_and_fetch))

    def move(self, kept: Sequence[int]) -> None:
        """Write the kept rows of the tree, a path, before its other rows."""
        assert self._tree is not None
        path = mx.array(list(kept))
        for part, kind, (keys, values) in zip(self.parts, self._kinds, self._new, strict=True):
            assert kind.write is not None
            kind.write(part, keys[..., path, :], values[..., path, :], len(self._tree))

    def commit(self, kept: int, rejected: int) -> None:
        """Remove the last `rejected` rows."""
        for part, kind in zip(self.parts, self._kinds, strict=True):
            if self._tree is not None:
                unhook(part)
            assert kind.cut is not None
            kind.cut(part, rejected)
        self._tree = None

    def _mask_of(self, cache: Any, tree: Tree) -> Callable[..., mx.array]:
        """The replacement of a cache's `make_mask`."""

        def make_mask(
            N: int, return_array: bool = False, window_size: int | None = None
        ) -> mx.array:
            self.made_masks += 1
            held, window = kind_of(cache).held(cache)
            return tree.mask(held, window_size or window)

        return make_mask

    def _recorder(self, at: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of a cache's `update_and_fetch`."""

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            self._new[at] = keys, values
            return own(keys, values)

        return update_and_fetch
