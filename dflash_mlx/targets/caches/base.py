"""What a session asks of one layer's cache, and the same asked of all caches of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..span import Span

Arrays = dict[str, mx.array]
Contents = Sequence[Any]  # arrays and trees of arrays


class DraftCache(Protocol):
    """One layer's cache. The model calls it as mlx-lm's class, from which each kind is made.

    Attributes:
        can_trim: whether any last rows can be cut, so that there is no state.
        rolls_back: whether rejected rows leave it without another forward.
        reads_trees: whether a verification's rows may be a tree.
    """

    can_trim: bool
    rolls_back: bool
    reads_trees: bool

    def begin(self, tree: Span) -> None:
        """Read this tree in the next verification. A chain needs no preparation."""

    def commit(self, kept: Sequence[int], rows: int) -> None:
        """Keep these of the last verification's rows, a path from row 0, and remove the others."""

    def trim(self, rows: int) -> object:
        """Forget the last rows; only if `can_trim`."""

    def checkpoint(self) -> Any:
        """The state, held by reference. It stays valid whatever is appended to the cache."""

    def rewind(self, saved: Any, rows: int) -> None:
        """Go back to a checkpoint, so many rows ago."""

    def arrays(self) -> list[Any]:
        """What the cache consists of: arrays, trees of arrays and numbers. Nothing is copied."""

    def export_rows(self, start: int, end: int) -> Arrays:
        """The rows of the tokens from `start` to `end`, as lazy slices by name."""

    def export_state(self) -> Arrays:
        """The state at the cache's own position by name; none of a cache that can be trimmed."""

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Fill an empty cache with `position` tokens. The given arrays are not shared with it.

        Args:
            position: tokens.
            rows: results of `export_rows`, in order, up to the position.
            state: the result of `export_state` at the position.
            room: tokens that are about to follow.
        """


@dataclass(frozen=True)
class Checkpoint:
    """The caches after `position` tokens, a checkpoint of each."""

    position: int
    states: tuple[Any, ...]


def checkpoint_all(caches: Sequence[DraftCache], position: int) -> Checkpoint:
    """Save the state of these caches of `position` tokens."""
    return Checkpoint(position, tuple(cache.checkpoint() for cache in caches))


def rewind_all(caches: Sequence[DraftCache], position: int, saved: Checkpoint) -> None:
    """Put caches of `position` tokens back to a checkpoint."""
    for cache, state in zip(caches, saved.states, strict=True):
        cache.rewind(state, position - saved.position)


def arrays_of_all(caches: Sequence[DraftCache]) -> list[Any]:
    """What these caches consist of, to be computed."""
    return [cache.arrays() for cache in caches]


def rows_of_all(caches: Sequence[DraftCache], start: int, end: int) -> Arrays:
    """The rows of the tokens from `start` to `end`, as lazy slices by name."""
    return numbered([cache.export_rows(start, end) for cache in caches])


def state_of_all(caches: Sequence[DraftCache]) -> Arrays:
    """The states at the caches' own position, by name; none of a cache that can be trimmed."""
    return numbered([cache.export_state() for cache in caches])


def restore_all(
    caches: Sequence[DraftCache], position: int, rows: Sequence[Arrays], state: Arrays, room: int
) -> None:
    """Fill empty caches, as `DraftCache.restore` does, with results of the two functions above."""
    for number, cache in enumerate(caches):
        prefix = f"{number}."
        pieces = [strip_prefix(piece, prefix) for piece in rows]
        cache.restore(position, pieces, strip_prefix(state, prefix), room)


def numbered(caches: Sequence[Arrays]) -> Arrays:
    """Arrays of several caches in one dictionary: `name` of cache 3 is `3.name`."""
    arrays: Arrays = {}
    for number, cache_arrays in enumerate(caches):
        for name, x in cache_arrays.items():
            arrays[f"{number}.{name}"] = x
    return arrays


def strip_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def reference(value: Any) -> Any:
    """A field's value that no later assignment to an array's rows, or to a list, will change."""
    if isinstance(value, list):
        return list(value)
    return value[...] if isinstance(value, mx.array) else value
