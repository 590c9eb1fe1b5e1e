"""Rank 0's target, whose sessions have the other ranks repeat every operation on them."""

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

# A forward reads at most this many tokens of a prompt; a longer one could seem lost.
MAX_PROMPT_CHUNK = 512
# The name of the array that holds the number of the other ranks' arrays.
REMOTE_NUMBER = "piece"


class LeaderTarget(Target):
    """Rank 0's part of a target.

    Args:
        leader: sends operations to the other ranks.
        whole_head: the head before it was split, for drafters; None if it was not split.
        target_arguments: the arguments of `Target`.

    Attributes:
        can_trim: whether the sessions' caches can be trimmed to any position on all other ranks.
    """

    can_trim = True
    is_distributed = True

    def __init__(
        self, leader: Leader, whole_head: nn.Module | None, *target_arguments: Any
    ) -> None:
        self.leader = leader
        self._whole_head = whole_head
        super().__init__(*target_arguments)

    def start(self, tap_layers: Sequence[int] = (), kv_bits: int | None = None) -> TargetSession:
        """Begin one request with empty caches on all ranks."""
        self._find_taps(tuple(tap_layers))
        return LeaderSession(self.leader, self, tap_layers=tap_layers, kv_bits=kv_bits)

    def forward(self, rows: Rows, logits: Literal["all", "last"] = "all") -> Verified:
        """Verify as `Target.forward` does, on all ranks. The result is computed."""
        forward = super().forward
        if rows.is_prompt:  # part of `read`, which the other ranks also run
            return forward(rows, logits)
        drafts = []
        spans = []
        self.check_rows(rows)
        for span in rows.spans:
            tokens = span.proposal.tokens
            ids: Any = tokens.tolist() if isinstance(tokens, mx.array) else tokens
            parents = () if span.is_chain else span.parents
            drafts.append((_number(span), ids, parents))
            spans.append(Span(span.session, Proposal(ids, parents)))
        rows_on_host = Rows(spans, slots=rows.slots)
        return self.leader.run(lambda: forward(rows_on_host, logits), VERIFY, drafts, logits)

    def read(self, spans: Sequence[Span]) -> list[tuple[mx.array | None, mx.array]]:
        """Read a prompt's tokens as `Target.read` does, on all ranks."""
        [span] = spans
        read = super().read
        return self.leader.run(
            lambda: read(spans),
            READ,
            _number(span),
            span.proposal.tokens,
            span.ends_prompt,
        )

    def head(self, hidden: mx.array) -> mx.array:
        """Logits of hidden states; rank 0 uses the whole head."""
        return super().head(hidden) if self._whole_head is None else self._whole_head(hidden)

    def features(self, tokens: mx.array, layers: Sequence[int], cache: Any = None) -> Any:
        """Raise `SettingsError`: the other ranks run sessions only."""
        raise SettingsError(
            f"{self.name} is split over several machines, which cannot train: use one machine."
        )


@dataclass(frozen=True)
class NumberedCheckpoint(Checkpoint):
    """A checkpoint with its number on every rank."""

    number: int


def repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a session so that the other ranks repeat it on their own caches.

    The result on this rank and the results on the other ranks have the same number.
    """

    @wraps(method)
    def call(session: LeaderSession, *arguments: Any) -> Any:
        return session.numbered(method(session, *arguments), method.__name__, arguments)

    return call


class LeaderSession(TargetSession):
    """One request's caches on rank 0, and under its number on all other ranks."""

    longest = MAX_PROMPT_CHUNK

    def __init__(
        self,
        leader: Leader,
        target: LeaderTarget,
        *,
        tap_layers: Sequence[int],
        kv_bits: int | None,
    ) -> None:
        super().__init__(target, tap_layers, kv_bits)
        self._leader = leader
        self._number = -1
        self._others_can_trim = target.can_trim
        self.can_pipeline = False  # the other ranks need the tokens of each step

    @property
    def number(self) -> int:
        """The session's number. The other ranks start the session when it is first read."""
        if self._number < 0:
            number = self._leader.repeat(TARGET, "start", self.tap_layers, self.kv_bits)
            self._number = self._drop_with(self, number)
        return self._number

    commit = repeated(TargetSession.commit)
    trim_to = repeated(TargetSession.trim_to)
    checkpoint = repeated(TargetSession.checkpoint)
    rewind = repeated(TargetSession.rewind)
    rows = repeated(TargetSession.rows)
    state = repeated(TargetSession.state)
    restore = repeated(TargetSession.restore)

    def numbered(self, result: Any, method: str, arguments: Sequence[Any]) -> Any:
        """Have the other ranks repeat a method, and add the number of their results to ours."""
        if result == {} and self._others_can_trim:
            return result  # no rank has such a state
        sent_arguments = map(_by_number, arguments)
        number = self._leader.repeat(self.number, method, *sent_arguments)
        if isinstance(result, Checkpoint):
            result = NumberedCheckpoint(result.position, result.states, number)
            self._drop_with(result, number)
        elif result is not None:
            result = result | {REMOTE_NUMBER: mx.array([number], mx.int32)}
        return result

    @property
    def can_trim(self) -> bool:
        """Whether the caches of all ranks can be trimmed to any position."""
        return self._others_can_trim and super().can_trim

    def _drop_with(self, owner: Any, number: int) -> int:
        """Have the other ranks drop their objects of this number when `owner` is collected."""
        weakref.finalize(owner, self._leader.drop, number).atexit = False
        return number


class LeaderPrefixStore(PrefixStore):
    """Rank 0's prefix cache. The other ranks store and evict the same entries.

    `memory` is the limit on each machine. Raises `SettingsError` for a folder, because it would
    lack the parts of the other ranks.
    """

    def __init__(self, target: LeaderTarget, drafter: Drafter | None, **settings: Any) -> None:
        if settings.get("folder") is not None:
            raise SettingsError("A prefix store for several machines cannot be kept on disk.")
        super().__init__(target, drafter, **settings)
        self._leader = target.leader

    def _on_evict(self, entry: Entry) -> None:
        for part in ("rows", "state"):
            arrays = strip_prefix(entry.arrays or {}, f"target.{part}.")
            if REMOTE_NUMBER in arrays:
                self._leader.drop(_remote_number(arrays))


def _number(span: Span) -> int:
    """The number of a span's session on the other ranks."""
    session = span.session
    assert isinstance(session, LeaderSession)
    return session.number


def _by_number(argument: Any) -> Any:
    """Make an argument ready for a message: objects that every rank has become their number."""
    if isinstance(argument, NumberedCheckpoint):
        return {NUMBER: argument.number}
    if isinstance(argument, dict):
        return {NUMBER: _remote_number(argument)} if REMOTE_NUMBER in argument else {}
    if isinstance(argument, Sequence):
        return [_by_number(item) for item in argument if item != {}]
    return argument


def _remote_number(arrays: Arrays) -> int:
    """The number of the other ranks' arrays."""
    number: Any = arrays[REMOTE_NUMBER].item()
    return int(number)
