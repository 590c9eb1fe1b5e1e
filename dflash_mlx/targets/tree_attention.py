"""Reading a draft tree in one forward: a node sees its ancestors and no other branch.

mlx-lm's models take two things from elsewhere that tell a row where it stands: the attention mask,
which they ask their caches for, and the rotation of queries and keys, which is their `rope`
module's. So no family needs a forward of its own. While a tree is verified the caches give the
ancestor mask and each `rope` rotates a row by its depth in place of its row number; sliding
windows are measured in depths, too. What has no keys has a file of its own: `recurrent_tree` for
Gated DeltaNet and `compressed_tree` for DeepSeek-V4.1.

A commit first puts the kept rows in front, where those of a chain would be; the rollback then
forgets the rest. They are written from what entered the caches in this verify, so the history is
neither read nor copied. (Reading them from the cache would be a second use of its array, and MLX
changes an array in place only when it has no other.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedTreeError
from ..proposal import Proposal
from .internals import (
    ROPES,
    CacheList,
    QuantizedKVCache,
    RotatingKVCache,
    end_of_ring,
    hook,
    unhook,
)
from .overrides import Overrides
from .rows import RowRollback, TreeRollback
from .tree import Tree


class TreeReader:
    """Has one request's caches and modules read trees, while a forward asks for it.

    Args:
        layers: the model's decoder layers.
        caches: the request's, one per layer (fewer where layers share them).
        rollbacks: theirs; a `TreeRollback` has its layer read trees in another way.
        overrides: an empty set of the target's, which is filled and is to be installed with the
            verify's own.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        caches: Sequence[Any],
        rollbacks: Sequence[Any],
        overrides: Overrides,
    ) -> None:
        self.overrides = overrides
        self._tree: Tree | None = None
        rows = zip(caches, rollbacks, strict=True)
        self._caches = [
            part for cache, way in rows if isinstance(way, RowRollback) for part in _parts(cache)
        ]
        self._new: dict[int, tuple[mx.array, mx.array]] = {}  # what entered each cache
        self._branches = [way for way in rollbacks if isinstance(way, TreeRollback)]
        for way in self._branches:
            way.branch(overrides, lambda: self.tree)
        for rope in {id(rope): rope for layer in layers for rope in ropes(layer)}.values():
            overrides.replace(rope, self._by_depth(type(rope).__call__))

    @property
    def tree(self) -> Tree:
        """The tree that is read, or was last."""
        assert self._tree is not None
        return self._tree

    @contextmanager
    def reading(self, proposal: Proposal) -> Iterator[None]:
        """Have the forward run inside read this tree.

        Raises `UnsupportedTreeError` when it did not ask for a mask.
        """
        self._tree, self._masks = Tree(proposal), 0
        for index, cache in enumerate(self._caches):
            hook(cache, self._mask_of(cache), self._recorder(index, cache.update_and_fetch))
        try:
            yield
        finally:
            for cache in self._caches:
                unhook(cache)
        if self._caches and not self._masks:
            raise UnsupportedTreeError("The target makes masks of its own: draft chains for it.")

    @contextmanager
    def installed(self, proposal: Proposal, verify: Overrides) -> Iterator[None]:
        """The same, with the overrides of the verify and those of trees installed."""
        with self.reading(proposal), verify.installed(self.overrides):
            yield

    def move(self, kept: Sequence[int]) -> None:
        """Put the kept rows of the tree that was read last, a path, before its other rows."""
        rows, path = len(self.tree), mx.array(list(kept))
        for index, cache in enumerate(self._caches):
            keys, values = self._new[index]
            write_rows(cache, keys[..., path, :], values[..., path, :], rows)
        for way in self._branches:
            way.move(kept)

    def _mask_of(self, cache: Any) -> Callable[..., mx.array]:
        """What stands in for a cache's `make_mask`."""

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
        """What stands in for a cache's `update_and_fetch`."""

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            self._new[index] = keys, values
            return own(keys, values)

        return update_and_fetch

    def _by_depth(self, own: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """A rotation of x [1, H, N, D] or [1, N, D] by the offset plus each row's depth."""

        def call(rope: nn.Module, x: mx.array, offset: Any = 0, **settings: Any) -> mx.array:
            if not isinstance(offset, mx.array) or not offset.ndim:
                offset = offset + self.tree.depths
            # Rows on the batch axis: there each may have its own position.
            return own(rope, x.swapaxes(0, -2), offset=offset, **settings).swapaxes(0, -2)

        return call


def why_no_trees(layer: nn.Module, rollback: Any) -> str | None:
    """What keeps a decoder layer from reading trees; None when it can.

    `rollback` is of the layer's cache, or None where it has none of its own.
    """
    if isinstance(rollback, TreeRollback):
        return None
    if not isinstance(rollback, RowRollback | None):
        return f"a {type(layer).__name__} of {type(layer).__module__}"
    found = ropes(layer)
    unknown = [type(rope).__name__ for rope in found if type(rope).__name__ not in ROPES]
    if unknown:
        return f"positions by {unknown[0]}"
    return None if found else f"a {type(layer).__name__} without a rope"


def ropes(layer: nn.Module) -> list[nn.Module]:
    """The rotations in a decoder layer; an indexer has one of its own."""
    return [part for path, part in layer.named_modules() if path.rpartition(".")[2] == "rope"]


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


def _parts(cache: Any) -> Sequence[Any]:
    """The caches in a layer's cache."""
    return cache.caches if isinstance(cache, CacheList) else (cache,)
