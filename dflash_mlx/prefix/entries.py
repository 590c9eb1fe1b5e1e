"""What the store holds: the rows of a chunk, or all that a place needs to be gone on from.

Entries share nothing with caches or with each other, so that letting one go frees its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..drafter.protocol import DraftSession
from ..targets import TargetSession
from ..targets.caches import Arrays, strip_prefix


@dataclass
class Place:
    """Where a mark stands: so many tokens after the end of a chunk, fewer than a chunk has."""

    chunk: bytes
    length: int


@dataclass
class Entry:
    """One thing to keep or to let go.

    Attributes:
        key: its name.
        arrays: contiguous, by session and name; None once it was let go.
        place: of a mark; None for the rows of a chunk.
    """

    key: bytes
    arrays: Arrays | None
    place: Place | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(x.nbytes for x in (self.arrays or {}).values())


class Places:
    """Where marks stand, by the chunk that they come after."""

    def __init__(self) -> None:
        self._of: dict[bytes, Place] = {}
        self._after: dict[bytes, dict[bytes, int]] = {}

    def add(self, mark: bytes, place: Place) -> None:
        """A mark of this key stands here."""
        self._of[mark] = place
        self._after.setdefault(place.chunk, {})[mark] = place.length

    def forget(self, mark: bytes) -> None:
        """It is gone, if it was one."""
        place = self._of.pop(mark, None)
        if place is not None:
            marks = self._after[place.chunk]
            del marks[mark]
            if not marks:
                del self._after[place.chunk]

    def after(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """How many tokens after a chunk's end marks stand, in order, and their keys."""
        return sorted((length, mark) for mark, length in self._after.get(chunk, {}).items())


def can_trim(target: TargetSession, drafter: DraftSession) -> bool:
    """Whether rows are all that a pair is gone on from, so that no marks are needed."""
    return target.can_trim and drafter.can_trim


def rows_of(target: TargetSession, drafter: DraftSession, start: int, end: int) -> Arrays:
    """A copy of the rows of both from `start` to `end`."""
    found = _named("target.rows.", target.rows(start, end))
    return found | _named("draft.rows.", drafter.rows(start, end))


def state_of(target: TargetSession, drafter: DraftSession) -> Arrays:
    """A copy of the states of both, at their position."""
    found = _named("target.state.", target.state())
    return found | _named("draft.state.", drafter.state())


def restore(
    target: TargetSession, drafter: DraftSession, position: int, pieces: Sequence[Arrays], room: int
) -> None:
    """Have new sessions begin with `position` tokens.

    Args:
        pieces: the rows of whole chunks, then a mark's arrays, if the pair needs one.
        room: tokens that are about to follow.
    """
    session: Any
    for name, session in (("target", target), ("draft", drafter)):
        rows = [strip_prefix(piece, f"{name}.rows.") for piece in pieces]
        session.restore(position, rows, strip_prefix(pieces[-1], f"{name}.state."), room)


def _named(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}{name}": mx.contiguous(x) for name, x in arrays.items()}
