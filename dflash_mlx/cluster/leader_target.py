"""Rank 0's target: its sessions send to the other ranks what is done to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from ..drafter.protocol import Drafter
from ..errors import SettingsError
from ..prefix.entries import Entry
from ..prefix.store import PrefixStore
from ..proposal import Proposal
from ..targets import Target, TargetSession
from ..targets.caches import Arrays, Checkpoint, strip_prefix
from ..targets.rows import Rows, Verified
from ..targets.span import Span
from .channel import NUMBER, READ, TARGET, VERIFY
from .leader import Leader

CHUNK = 512  # tokens of a prompt in one forward, so that none takes long enough to seem lost
PIECE = "piece"  # the array that holds the number of the other ranks' arrays


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
        self._taps_of(tuple(tap_layers))
        return LeaderSession(self.leader, self, tap_layers, kv_bits)

    def forward(self, rows: Rows, logits: Literal["all", "last"] = "all") -> Verified:
        """Verify as `Target.forward` does, on all ranks, and computed."""
        drafts = []
        spans = []
        for span in rows.spans:
            if not rows.is_prompt:
                self.check(span.proposal)
            tokens = span.proposal.tokens
            ids: Any = tokens.tolist() if isinstance(tokens, mx.array) else tokens
            parents = () if span.is_chain else span.parents
            drafts.append((_number(span), ids, parents))
            spans.append(Span(span.session, Proposal(ids, parents), span.ends_prompt))
        known = Rows(spans, is_prompt=rows.is_prompt, slots=rows.slots)
        own = super().forward
        return self.leader.run(lambda: own(known, logits), VERIFY, drafts)

    def read(self, spans: Sequence[Span]) -> list[tuple[mx.array | None, mx.array]]:
        """Read a prompt's tokens as `Target.read` does, on all ranks."""
        [span] = spans
        own = super().read
        return self.leader.run(
            lambda: own(spans),
            READ,
            _number(span),
            span.proposal.tokens,
            span.ends_prompt,
        )

    def head(self, hidden: mx.array) -> mx.array:
        """See `Target`; the whole head on rank 0."""
        return super().head(hidden) if self._whole_head is None else self._whole_head(hidden)

    def features(self, tokens: mx.array, layers: Sequence[int], cache: Any = None) -> Any:
        """Not supported: other ranks run sessions only. Raises `SettingsError`."""
        raise SettingsError(f"{self.name} is spread over machines, which do not train: use one.")


@dataclass(frozen=True)
class NumberedCheckpoint(Checkpoint):
    """A checkpoint with its number on every rank."""

    number: int


def repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a session that the other ranks repeat on their own caches.

    What it returns belongs to this rank, and the other ranks keep theirs under the same number.
    """

    @wraps(method)
    def call(session: LeaderSession, *arguments: Any) -> Any:
        return session.numbered(method(session, *arguments), method.__name__, arguments)

    return call


class LeaderSession(TargetSession):
    """One request's caches on rank 0, and under its number on all other ranks."""

    longest = CHUNK

    def __init__(self, leader: Leader, target: LeaderTarget, *of: Any) -> None:
        super().__init__(target, *of)
        self._leader, self._number = leader, -1
        self._others_can_trim = target.can_trim
        self.can_pipeline = False  # the other ranks need the tokens of each step

    @property
    def number(self) -> int:
        """Of the session, which starts on the other ranks when this is first asked for."""
        if self._number < 0:
            number = self._leader.repeat(TARGET, "start", self.tap_layers, self.kv_bits)
            self._number = self._drop_with(self, number)
        return self._number

    commit, trim_to = repeated(TargetSession.commit), repeated(TargetSession.trim_to)
    checkpoint, rewind = repeated(TargetSession.checkpoint), repeated(TargetSession.rewind)
    rows, state = repeated(TargetSession.rows), repeated(TargetSession.state)
    restore = repeated(TargetSession.restore)

    def numbered(self, found: Any, method: str, arguments: Sequence[Any]) -> Any:
        """A method's result with the number that it gets on the other ranks, which repeat it."""
        if found == {} and self._others_can_trim:
            return found  # no rank has such a state
        known = map(_by_number, arguments)
        number = self._leader.repeat(self.number, method, *known)
        if isinstance(found, Checkpoint):
            found = NumberedCheckpoint(found.position, found.states, number)
            self._drop_with(found, number)
        elif found is not None:
            found = found | {PIECE: mx.array([number], mx.int32)}
        return found

    @property
    def can_trim(self) -> bool:
        """See `TargetSession`; on all ranks."""
        return self._others_can_trim and super().can_trim

    def _drop_with(self, owner: Any, number: int) -> int:
        """Have the other ranks drop what belongs to an object when that is collected."""
        weakref.finalize(owner, self._leader.drop, number).atexit = False
        return number


class LeaderPrefixStore(PrefixStore):
    """Rank 0's prefix cache; the other ranks store and evict the same. `memory` is per machine.

    Raises `SettingsError` for a folder, which would lack the other ranks' parts.
    """

    def __init__(self, target: LeaderTarget, drafter: Drafter | None, **settings: Any) -> None:
        if settings.get("folder") is not None:
            raise SettingsError("A prefix store of several machines is not kept on disk.")
        super().__init__(target, drafter, **settings)
        self._leader = target.leader

    def _on_evict(self, entry: Entry) -> None:
        for part in ("rows", "state"):
            piece = strip_prefix(entry.arrays or {}, f"target.{part}.")
            if PIECE in piece:
                self._leader.drop(_number_of(piece))


def _number(span: Span) -> int:
    """The number on the other ranks of the session that the rows are for."""
    session = span.session
    assert isinstance(session, LeaderSession)
    return session.number


def _by_number(argument: Any) -> Any:
    """An argument as in a message: what every rank has of its own is named by its number."""
    if isinstance(argument, NumberedCheckpoint):
        return {NUMBER: argument.number}
    if isinstance(argument, dict):
        return {NUMBER: _number_of(argument)} if PIECE in argument else {}
    if isinstance(argument, Sequence):
        return [_by_number(one) for one in argument if one != {}]
    return argument


def _number_of(piece: Arrays) -> int:
    number: Any = piece[PIECE].item()
    return int(number)
