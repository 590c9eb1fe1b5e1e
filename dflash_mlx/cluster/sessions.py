"""A target whose sessions tell the other ranks what is done to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SettingsError
from ..proposal import Proposal
from ..targets import Target, TargetSession
from ..targets.caches import Arrays, Checkpoint
from ..targets.target import PREFILL_STEP
from .leader import Leader
from .wire import Kind, optional

CHUNK = 512  # tokens of a prompt in one forward: none is to last long enough to seem lost
PIECE = "piece"  # the name under which rows and states have the number of the others' own


class LeadingTarget(Target):
    """Rank 0's shard of a target.

    Args:
        leader: of the other ranks.
        whole_head: the head before it was sliced, for drafts; None where it was not.

    Attributes:
        can_trim: whether the sessions' caches on all other ranks can be cut anywhere; those of
            other layers may not.
    """

    can_trim = True

    def __init__(self, leader: Leader, whole_head: nn.Module | None, *of: Any) -> None:
        self.leader, self._whole_head = leader, whole_head
        super().__init__(*of)

    def start(self, tap_layers: Sequence[int] = (), kv_bits: int | None = None) -> TargetSession:
        """As of `Target`."""
        with self.forward_lock:
            return LeadingSession(self.leader, self, self.layers, tap_layers, kv_bits)

    def verify_batch(self, forward: Callable[..., Any], sessions: Any, proposals: Any) -> Any:
        """As of `Target`; the others run it, too."""
        return self.leader.verify(forward, sessions, proposals)

    def head(self, hidden: mx.array) -> mx.array:
        """As of `Target`; rank 0 has all of it."""
        return super().head(hidden) if self._whole_head is None else self._whole_head(hidden)

    def features(self, tokens: mx.array, layers: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Not here: the other ranks know of sessions only. Raises `SettingsError`."""
        raise SettingsError(f"{self.name} is spread over machines, which do not train: use one.")


@dataclass(frozen=True)
class NumberedCheckpoint(Checkpoint):
    """A checkpoint with its number on every rank."""

    number: int


class LeadingSession(TargetSession):
    """One request's caches on rank 0, and by its number on all others."""

    def __init__(self, leader: Leader, target: LeadingTarget, *of: Any) -> None:
        super().__init__(target, *of)
        self._leader, self.number, self._known = leader, leader.number(), False
        self._others_can_trim = target.can_trim
        self.can_pipeline = False  # the others have to be told the tokens

    def introduce(self) -> None:
        """Have the others begin it, too; most sessions are only looked at, and need none."""
        if self._known:
            return
        self._known = True
        self._leader.tell(Kind.START, self.number, optional(self.kv_bits), *self.tap_layers)
        weakref.finalize(self, self._leader.tell, Kind.DROP, self.number).atexit = False

    def prefill(
        self,
        tokens: Sequence[int],
        stops: Sequence[int] = (),
        step: Callable[[], int] = lambda: PREFILL_STEP,
    ) -> Iterator[tuple[mx.array | None, mx.array]]:
        """As of `TargetSession`, in shorter steps."""
        return super().prefill(tokens, stops, lambda: min(step(), CHUNK))

    def read(self, tokens: Sequence[int], last: bool) -> tuple[mx.array | None, mx.array]:
        """As of `TargetSession`, on all ranks."""
        self.introduce()
        own = super().read
        return self._leader.lead(lambda: own(tokens, last), Kind.READ, [self.number, last, *tokens])

    def verify(self, proposal: Proposal) -> tuple[mx.array, mx.array]:
        """As of `TargetSession`, on all ranks, and computed."""
        if not proposal.is_chain:
            self._target.check_trees()
        own = super().verify
        return self._leader.verify(lambda _, known: own(known[0]), [self], [proposal])

    def commit(self, kept: Sequence[int]) -> None:
        """As of `TargetSession`."""
        super().commit(kept)
        self._leader.tell(Kind.COMMIT, self.number, *kept)

    @property
    def can_trim(self) -> bool:
        """As of `TargetSession`, on all ranks."""
        return self._others_can_trim and super().can_trim

    def trim_to(self, position: int) -> None:
        """As of `TargetSession`."""
        super().trim_to(position)
        self.introduce()
        self._leader.tell(Kind.CUT, self.number, position)

    def checkpoint(self) -> Checkpoint:
        """As of `TargetSession`; the others forget theirs when this one is gone."""
        own = super().checkpoint()
        checkpoint = NumberedCheckpoint(own.position, own.states, self._leader.number())
        self.introduce()
        self._leader.tell(Kind.MARK, self.number, checkpoint.number)
        weakref.finalize(
            checkpoint, self._leader.tell, Kind.FORGET, checkpoint.number
        ).atexit = False
        return checkpoint

    def rewind(self, checkpoint: Checkpoint) -> None:
        """As of `TargetSession`."""
        assert isinstance(checkpoint, NumberedCheckpoint)
        super().rewind(checkpoint)
        self._leader.tell(Kind.REWIND, self.number, checkpoint.number)

    def rows(self, start: int, end: int) -> Arrays:
        """As of `TargetSession`, with a number for what the others keep."""
        return self._kept(super().rows(start, end), start, end)

    def state(self) -> Arrays:
        """As of `TargetSession`, with a number for what the others keep."""
        found = super().state()
        kept = found or not self._others_can_trim
        return self._kept(found, None, self.position) if kept else found

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """As of `TargetSession`; the others have what the numbers stand for."""
        super().restore(position, rows, state, room)
        self.introduce()
        pieces = [number_of(piece) for piece in rows if PIECE in piece]
        whole = number_of(state) if PIECE in state else None
        self._leader.tell(Kind.RESTORE, self.number, position, room, optional(whole), *pieces)

    def _kept(self, arrays: Arrays, start: int | None, end: int) -> Arrays:
        number = self._leader.number()
        self.introduce()
        self._leader.tell(Kind.KEEP, self.number, number, optional(start), end)
        return arrays | {PIECE: mx.array([number], mx.int32)}


def number_of(piece: Arrays) -> int:
    """The number that rows or a state have on the other ranks."""
    number: Any = piece[PIECE].item()
    return int(number)
