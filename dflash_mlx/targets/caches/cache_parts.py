"""A layer with several caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..internals import CacheList
from ..span import Span
from .base import Arrays, DraftCache, numbered, restore_all


class CacheParts(CacheList):
    """Caches of one layer, such as the attention's and an indexer's."""

    caches: Sequence[DraftCache]

    @property
    def can_trim(self) -> bool:
        """Whether all parts can be trimmed."""
        return all(part.can_trim for part in self.caches)

    @property
    def rolls_back(self) -> bool:
        """Whether rejected rows leave all parts without another forward."""
        return all(part.rolls_back for part in self.caches)

    @property
    def reads_trees(self) -> bool:
        """Whether all parts read trees."""
        return all(part.reads_trees for part in self.caches)

    def begin(self, tree: Span) -> None:
        """Prepare all parts for a verification whose rows are a tree."""
        for part in self.caches:
            part.begin(tree)

    def commit(self, kept: Sequence[int], rows: int) -> None:
        """Keep these rows of the verification in all parts."""
        for part in self.caches:
            part.commit(kept, rows)

    def checkpoint(self) -> list[Any]:
        """Hold the states of all parts by reference."""
        return [part.checkpoint() for part in self.caches]

    def rewind(self, saved: list[Any], rows: int) -> None:
        """Go back to a checkpoint in all parts."""
        for part, state in zip(self.caches, saved, strict=True):
            part.rewind(state, rows)

    def arrays(self) -> list[Any]:
        """List the arrays of all parts."""
        return [part.arrays() for part in self.caches]

    def export_rows(self, start: int, end: int) -> Arrays:
        """Slice the rows of these tokens; `name` of the second part is `1.name`."""
        return numbered([part.export_rows(start, end) for part in self.caches])

    def export_state(self) -> Arrays:
        """Name the arrays of all states."""
        return numbered([part.export_state() for part in self.caches])

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """Fill all parts with these arrays."""
        restore_all(self.caches, position, rows, state, room)
