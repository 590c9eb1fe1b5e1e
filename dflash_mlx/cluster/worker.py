"""What all ranks but the first do: on their shards what rank 0 did, as it tells them.

Here is no drafter, no sampler and no socket, and nothing is decided. So machines whose sums round
differently never part: only rank 0's logits are looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..errors import ClusterError
from ..proposal import Proposal
from ..targets import Target, TargetSession
from ..targets.batched import BatchVerifier
from ..targets.caches import Arrays, Checkpoint
from ..validation import ErrorWrapper
from .leader import LOST, REST_SECONDS
from .watchdog import Watch
from .wire import Kind, Told, Wire, given

Numbers = Sequence[int]


class Worker:
    """One rank's shard, and the sessions on it.

    Args:
        wire: to the other ranks.
        target: the shard.
        carry: as of `Leader`.

    Attributes:
        sessions: by the numbers that rank 0 gave them.
    """

    def __init__(
        self,
        wire: Wire,
        target: Target,
        carry: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        self._wire, self._target, self._carry = wire, target, carry
        self._forest: BatchVerifier | None = None  # made when two requests share a round
        self._marks: dict[int, Checkpoint] = {}
        self._pieces: dict[int, Arrays] = {}
        self.sessions: dict[int, TargetSession] = {}
        self._does: dict[Kind, Callable[[Numbers], None]] = {
            Kind.BEAT: lambda _: time.sleep(REST_SECONDS),
            Kind.START: self._start,
            Kind.READ: self._read,
            Kind.VERIFY: self._verify,
            Kind.COMMIT: lambda of: self.sessions[of[0]].commit(of[1:]),
            Kind.CUT: lambda of: self.sessions[of[0]].trim_to(of[1]),
            Kind.MARK: self._mark,
            Kind.REWIND: lambda of: self.sessions[of[0]].rewind(self._marks[of[1]]),
            Kind.FORGET: lambda of: self._forget(self._marks, of[0]),
            Kind.DROP: lambda of: self._forget(self.sessions, of[0]),
            Kind.KEEP: self._keep,
            Kind.FREE: lambda of: self._forget(self._pieces, of[0]),
            Kind.RESTORE: self._restore,
        }

    def follow(self, watch: Watch) -> None:
        """Do what rank 0 tells, until it tells no more. Raises `ClusterError` if it is lost.

        Args:
            watch: sees that it does not fall silent.
        """
        told = Told(Kind.START)
        while told.kind is not Kind.STOP:
            with ErrorWrapper(ClusterError, LOST), watch.expecting():
                for told in self._wire.receive():
                    if told.kind is not Kind.STOP:
                        self._does[told.kind](told.numbers)

    def _start(self, of: Numbers) -> None:
        number, kv_bits, *tap_layers = of
        self.sessions[number] = self._target.start(tap_layers, given(kv_bits))

    def _read(self, of: Numbers) -> None:
        number, last, *tokens = of
        # All that rank 0 computes is computed, in its order: there may be sums in it.
        mx.eval(self._carry(self.sessions[number].read(tokens, bool(last))))

    def _verify(self, of: Numbers) -> None:
        sessions, proposals, start = [], [], 0
        while start < len(of):
            number, rows, chain = of[start : start + 3]
            start += 3
            tokens = of[start : start + rows]
            start += rows
            parents = () if chain else tuple(of[start : start + rows])
            start += len(parents)
            sessions.append(self.sessions[number])
            proposals.append(Proposal(tokens, parents))
        if len(sessions) == 1:
            mx.eval(self._carry(sessions[0].verify(proposals[0])))
            return
        self._forest = self._forest or BatchVerifier(self._target)
        mx.eval(self._carry(self._forest.verify(sessions, proposals)))

    def _mark(self, of: Numbers) -> None:
        self._marks[of[1]] = self.sessions[of[0]].checkpoint()

    def _keep(self, of: Numbers) -> None:
        session, start = self.sessions[of[0]], given(of[2])
        found = session.state() if start is None else session.rows(start, of[3])
        piece = {name: mx.contiguous(x) for name, x in found.items()}
        mx.async_eval(piece)
        self._pieces[of[1]] = piece

    def _restore(self, of: Numbers) -> None:
        number, position, room, state, *pieces = of
        whole = given(state)
        rows = [self._pieces[piece] for piece in pieces]
        held = {} if whole is None else self._pieces[whole]
        self.sessions[number].restore(position, rows, held, room)

    @staticmethod
    def _forget(
        held: dict[int, TargetSession] | dict[int, Checkpoint] | dict[int, Arrays], at: int
    ) -> None:
        held.pop(at, None)
