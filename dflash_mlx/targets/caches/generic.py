"""Caches that only a checkpoint brings back: those of classes that are not known here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ..span import Span
from .base import Arrays, reference


class GenericCache:
    """The first base of a cache of any class: all its fields are a state.

    A session goes back to a checkpoint and runs the kept rows again.
    """

    can_trim = False
    rolls_back = False
    reads_trees = False

    def begin(self, tree: Span) -> None:
        """Never called: it reads no trees."""
        raise NotImplementedError

    def commit(self, kept: Sequence[int], rows: int) -> None:
        """Never called: only a checkpoint removes rejected rows."""
        raise NotImplementedError

    def checkpoint(self) -> dict[str, Any]:
        """Hold all arrays, lists of arrays and positions by reference."""
        return {
            name: reference(value)
            for name, value in vars(self).items()
            if value is None or isinstance(value, mx.array | int | list)
        }

    def rewind(self, saved: dict[str, Any], rows: int) -> None:
        """Go back to a checkpoint."""
        vars(self).update({name: reference(value) for name, value in saved.items()})

    def arrays(self) -> list[Any]:
        """List the arrays that the cache consists of."""
        return list(vars(self).values())

    def export_rows(self, start: int, end: int) -> Arrays:
        """Return nothing: no array is known to have a row per token."""
        return {}

    def export_state(self) -> Arrays:
        """Name the arrays of the state."""
        return {name: mx.array(x) for name, x in self.checkpoint().items() if x is not None}

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Fill the empty cache with these arrays."""
        numbers = {name for name, value in vars(self).items() if isinstance(value, int)}
        for name, x in state.items():
            setattr(self, name, x.item() if name in numbers else x[...])


@cache
def generic_class(kind: type) -> type:
    """A generic cache that is also a `kind`, so that the model finds what it asks for."""
    return type(kind.__name__, (GenericCache, kind), {})
