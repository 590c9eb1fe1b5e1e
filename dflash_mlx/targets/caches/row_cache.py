"""What caches with a row of keys and values per token have in common: rejected rows and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..span import Span
from .base import Contents


class RowCache:
    """The first base of a cache with rows, before mlx-lm's class.

    A chain's rejected rows are the last ones, so verifying it records nothing. Verifying a tree
    gives the model the mask of its ancestors, and the commit writes the kept path where a chain's
    rows would be. It takes the path from the verification's own keys and values, not from the
    cache: a second reference to the cache's arrays would make MLX copy them.

    Attributes:
        tree: what the running verification reads; None for a chain.
    """

    rolls_back = True
    reads_trees = True
    tree: Span | None = None
    keys: Any
    values: Any
    offset: int
    _new: tuple[mx.array, mx.array]  # keys and values of the tree's rows [1, H, N, D]

    def visible(self) -> tuple[int, int | None]:
        """How many older rows each verified row may see, and in which window, if there is one."""
        raise NotImplementedError

    def write(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Write keys and values [1, H, n, D] over the first of the last `rows` rows."""
        raise NotImplementedError

    def cut(self, rows: int) -> None:
        """Forget the last rows, which are rows of the last verification."""
        raise NotImplementedError

    def contents(self) -> Contents:
        """What a traced step reads and writes: keys, then values."""
        return self.keys, self.values

    def take(self, contents: Contents, rows: int) -> None:
        """Hold what a traced step of so many rows has made of the contents."""
        self.keys, self.values = contents
        self.offset += rows

    def reserve(self, rows: int) -> None:
        """Prepare the contents for a traced step, with room for so many more rows."""
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """The rows that fit into the arrays."""
        keys = self.keys[0] if isinstance(self.keys, tuple | list) else self.keys
        return int(keys.shape[2])

    def begin(self, tree: Span) -> None:
        """Prepare for a verification whose rows are a tree."""
        self.tree = tree

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next N rows, as mlx-lm's caches have it: [N, K] bool, or its name."""
        if self.tree is None:
            return super().make_mask(  # type: ignore[misc]  # of mlx-lm's class
                N, return_array=return_array, window_size=window_size
            )
        older, window = self.visible()
        return self.tree.mask(older, window_size or window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values [1, H, N, D]; returns all."""
        if self.tree is not None:
            self._new = keys, values
        return super().update_and_fetch(keys, values)  # type: ignore[misc]

    def commit(self, kept: Sequence[int], rows: int) -> None:
        """Keep these rows of the verification, and remove the others."""
        if self.tree is not None:
            if kept[-1] >= len(kept):  # rejected rows in between
                path = mx.array(list(kept))
                keys, values = self._new
                self.write(keys[..., path, :], values[..., path, :], rows)
            self.tree = None
            del self._new
        self.cut(rows - len(kept))
