"""One request's part of a forward that may hold other requests' rows, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..proposal import Proposal
from .overrides import Entry
from .rows import Rollback
from .tree import Tree
from .tree_attention import TreeReader


@dataclass(frozen=True)
class Segment:
    """What a session brings along: its rows, and what stands ready for them.

    Attributes:
        proposal: the rows,
        ids: their tokens [N],
        position: of the first of them.
        caches, rollbacks: one per layer, fewer where layers share them.
        entries: what the model's modules are while these rows alone go through them.
        reader: what has the caches read the proposal, where that is a tree; else None.
    """

    proposal: Proposal
    ids: mx.array
    position: int
    caches: Sequence[Any]
    rollbacks: Sequence[Rollback]
    entries: Sequence[Entry]
    reader: TreeReader | None

    @property
    def tree(self) -> Tree | None:
        """The tree that is read; None for a chain."""
        return None if self.reader is None else self.reader.tree
