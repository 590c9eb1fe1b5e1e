"""Rank 0's target: its sessions send to the other ranks what is done to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..drafter.protocol import Drafter
from ..errors import SettingsError
from ..prefix.cache import PrefixCache
from ..proposal import Proposal
from ..targets import Target, TargetSession
from ..targets.caches import Arrays, Checkpoint, strip_prefix
from .leader import Leader

CHUNK = 512  # tokens of a prompt in one forward, so that none takes long enough to seem lost
PIECE = "piece"  # the array that holds the number of the other ranks' rows or state


class LeaderTarget(Target):
    """Rank 0's part of a target.

    Args:
        leader: of the other ranks.
        whole_head: the head before it was split, for drafters; None if it was not.

    Attributes:
        can_trim: whether the sessions' caches can be trimmed to any position on all other ranks.
    """

    can_trim, is_distributed = True, True

    def __init__(self, leader: Leader, whole_head: nn.Module | None, *of: Any) -> None:
        self.leader, self._whole_head = leader, whole_head
        super().__init__(*of)

    def start(self, tap_layers: Sequence[int] = (), kv_bits: int | None = None) -> TargetSession:
        """See `Target`."""
        with self.forward_lock:
            return LeaderSession(self.leader, self, tap_layers, kv_bits)

    def verify_batch(self, forward: Callable[..., Any], sessions: Any, proposals: Any) -> Any:
        """See `Target`; runs on all ranks."""
        return self.leader.verify(forward, sessions, proposals)

    def head(self, hidden: mx.array) -> mx.array:
        """See `Target`; the whole head on rank 0."""
        return super().head(hidden) if self._whole_head is None else self._whole_head(hidden)

    def features(self, tokens: mx.array, layers: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Not supported: other ranks run sessions only. Raises `SettingsError`."""
        raise SettingsError(f"{self.name} is spread over machines, which do not train: use one.")


@dataclass(frozen=True)
class NumberedCheckpoint(Checkpoint):
    """A checkpoint with its number on every rank."""

    number: int


class LeaderSession(TargetSession):
    """One request's caches on rank 0, and under its number on all other ranks."""

    longest = CHUNK

    def __init__(self, leader: Leader, target: LeaderTarget, *of: Any) -> None:
        super().__init__(target, *of)
        self._leader, self.number, self._announced = leader, leader.number(), False
        self._others_can_trim = target.can_trim
        self.can_pipeline = False  # the other ranks need the tokens of each step

    def announce(self) -> None:
        """Start the session on the other ranks, before its first operation."""
        if self._announced:
            return
        self._announced = True
        self._leader.add("start", self.number, self.kv_bits, self.tap_layers)
        self._drop_with(self, self.number)

    def read(self, tokens: Sequence[int], last: bool) -> tuple[mx.array | None, mx.array]:
        """See `TargetSession`; on all ranks."""
        self.announce()
        own = super().read
        return self._leader.run(lambda: own(tokens, last), "read", self.number, tokens, last)

    def verify(self, proposal: Proposal) -> tuple[mx.array, mx.array]:
        """See `TargetSession`; on all ranks, and computed."""
        if not proposal.is_chain:
            self._target.check_trees()
        own = super().verify
        return self._leader.verify(lambda _, known: own(known[0]), [self], [proposal])

    def commit(self, kept: Sequence[int]) -> None:
        """See `TargetSession`."""
        super().commit(kept)
        self._leader.add("commit", self.number, [*kept])

    @property
    def can_trim(self) -> bool:
        """See `TargetSession`; on all ranks."""
        return self._others_can_trim and super().can_trim

    def trim_to(self, position: int) -> None:
        """See `TargetSession`."""
        super().trim_to(position)
        self.announce()
        self._leader.add("trim", self.number, position)

    def checkpoint(self) -> Checkpoint:
        """See `TargetSession`; the other ranks drop theirs together with this one."""
        own = super().checkpoint()
        checkpoint = NumberedCheckpoint(own.position, own.states, self._leader.number())
        self.announce()
        self._leader.add("checkpoint", self.number, checkpoint.number)
        self._drop_with(checkpoint, checkpoint.number)
        return checkpoint

    def rewind(self, checkpoint: Checkpoint) -> None:
        """See `TargetSession`."""
        assert isinstance(checkpoint, NumberedCheckpoint)
        super().rewind(checkpoint)
        self._leader.add("rewind", self.number, checkpoint.number)

    def rows(self, start: int, end: int) -> Arrays:
        """See `TargetSession`; with the number of what the other ranks store."""
        return self._stored(super().rows(start, end), start, end)

    def state(self) -> Arrays:
        """See `TargetSession`; with the number of what the other ranks store."""
        found = super().state()
        needed = found or not self._others_can_trim
        return self._stored(found, None, self.position) if needed else found

    def restore(self, position: int, rows: Sequence[Arrays], state: Arrays, room: int) -> None:
        """See `TargetSession`; the other ranks restore what they stored under these numbers."""
        super().restore(position, rows, state, room)
        self.announce()
        pieces = [_number_of(piece) for piece in rows if PIECE in piece]
        stored = _number_of(state) if PIECE in state else None
        self._leader.add("restore", self.number, position, room, stored, pieces)

    def _stored(self, arrays: Arrays, start: int | None, end: int) -> Arrays:
        number = self._leader.number()
        self.announce()
        self._leader.add("store", self.number, number, start, end)
        return arrays | {PIECE: mx.array([number], mx.int32)}

    def _drop_with(self, owner: Any, number: int) -> None:
        """Have the other ranks drop what belongs to an object when that is collected."""
        weakref.finalize(owner, self._leader.add, "drop", number).atexit = False


class LeaderPrefixCache(PrefixCache):
    """Rank 0's prefix cache; the other ranks store and evict the same. `memory` is per machine.

    Raises `SettingsError` for a folder, which would lack the other ranks' parts.
    """

    def __init__(self, target: LeaderTarget, drafter: Drafter | None, **settings: Any) -> None:
        if settings.get("folder") is not None:
            raise SettingsError("A prefix store of several machines is not kept on disk.")
        super().__init__(target, drafter, **settings)
        self._leader = target.leader

    def _evict(self, key: bytes) -> None:
        arrays = self._entries[key].arrays or {}
        for part in ("rows", "state"):
            piece = strip_prefix(arrays, f"target.{part}.")
            if PIECE in piece:
                self._leader.add("drop", _number_of(piece))
        super()._evict(key)


def _number_of(piece: Arrays) -> int:
    number: Any = piece[PIECE].item()
    return int(number)
