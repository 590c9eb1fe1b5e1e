"""Removing rejected rows from caches that hold a row per token: the last rows go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from .internals import CacheList, RotatingKVCache, cut_ring
from .overrides import Overrides
from .tree import Tree


class Rollback(Protocol):
    """How one layer's cache forgets rejected rows, for one request."""

    def begin(self) -> None:
        """Get ready for a verify forward."""

    def keep(self, kept: int, rejected: int) -> None:
        """Leave the first `kept` rows of the last verify in the cache, not the others."""


@runtime_checkable
class TreeRollback(Rollback, Protocol):
    """A rollback whose layer reads draft trees in a way of its own."""

    def branch(self, overrides: Overrides, tree: Callable[[], Tree]) -> None:
        """Have the layer read the tree that `tree` gives while `overrides` is installed."""

    def move(self, kept: Sequence[int]) -> None:
        """Put what was recorded of the kept rows, a path, where a chain's would be."""


class RowRollback:
    """Rollback of a cache that holds a row per token: the last rows go, nothing is remembered.

    Args:
        remove: forgets so many of the last rows. A cache that never drops any has its own `trim`:
            the next rows overwrite them. (MLA keeps its latents and rotary keys in such a one.)
    """

    def __init__(self, remove: Callable[[int], object]) -> None:
        self._remove = remove

    def begin(self) -> None:
        """Nothing to record."""

    def keep(self, kept: int, rejected: int) -> None:
        """Remove the last `rejected` rows."""
        if rejected:
            self._remove(rejected)


def cut_rotating_rows(cache: RotatingKVCache, rejected: int) -> None:
    """Forget the last rows of a sliding window, wrapped or not.

    A forward of several rows leaves the rows in temporal order and `max_size - 1` older ones
    before them, so cutting the end loses nothing that a later row can see. (The cache's own
    `trim` refuses once the window has wrapped, and would leave the ring in the wrong order.)
    """
    cut_ring(cache, rejected)


def trim_each(cache: CacheList, rejected: int) -> None:
    """Forget the last rows of every cache of a layer that has several (GLM-5, DeepSeek-V3.2)."""
    for part in cache.caches:
        part.trim(rejected)
