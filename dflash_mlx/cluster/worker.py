"""Every rank but the first: it repeats on its part of the model what rank 0 does.

It has no drafter, no sampler and no socket, and decides nothing. So ranks whose sums round
differently cannot diverge: only rank 0 looks at logits.
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
from .channel import Channel, Operation, OperationKind, decode_optional
from .leader import LOST, REST_SECONDS
from .watchdog import Watchdog

Numbers = Sequence[int]


class Worker:
    """One rank's part of the target, and the sessions on it.

    Args:
        channel: to the other ranks.
        target: this rank's part.
        gather: as for `Leader`.

    Attributes:
        sessions: by rank 0's numbers.
    """

    def __init__(
        self,
        channel: Channel,
        target: Target,
        gather: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        self._channel, self._target, self._gather = channel, target, gather
        self._batch: BatchVerifier | None = None  # created for the first step of two requests
        self._checkpoints: dict[int, Checkpoint] = {}
        self._pieces: dict[int, Arrays] = {}
        self.sessions: dict[int, TargetSession] = {}
        kinds = OperationKind
        self._handlers: dict[OperationKind, Callable[[Numbers], Any]] = {
            kinds.HEARTBEAT: lambda _: time.sleep(REST_SECONDS),
            kinds.STOP: lambda _: None,
            kinds.START: self._start,
            kinds.PREFILL: self._prefill,
            kinds.VERIFY: self._verify,
            kinds.COMMIT: lambda of: self.sessions[of[0]].commit(of[1:]),
            kinds.TRIM: lambda of: self.sessions[of[0]].trim_to(of[1]),
            kinds.CHECKPOINT: self._checkpoint,
            kinds.REWIND: lambda of: self.sessions[of[0]].rewind(self._checkpoints[of[1]]),
            kinds.DROP_CHECKPOINT: lambda of: self._checkpoints.pop(of[0], None),
            kinds.DROP_SESSION: lambda of: self.sessions.pop(of[0], None),
            kinds.STORE: self._store,
            kinds.DROP_PIECE: lambda of: self._pieces.pop(of[0], None),
            kinds.RESTORE: self._restore,
        }

    def run(self, watchdog: Watchdog) -> None:
        """Run rank 0's operations until it stops. Raises `ClusterError` if it is lost.

        Args:
            watchdog: notices a rank 0 that sends no more messages.
        """
        operation = Operation(OperationKind.START)
        while operation.kind is not OperationKind.STOP:
            with ErrorWrapper(ClusterError, LOST), watchdog.watching():
                for operation in self._channel.receive():
                    self._handlers[operation.kind](operation.numbers)

    def _start(self, of: Numbers) -> None:
        number, kv_bits, *tap_layers = of
        self.sessions[number] = self._target.start(tap_layers, decode_optional(kv_bits))

    def _prefill(self, of: Numbers) -> None:
        number, last, *tokens = of
        # Compute all that rank 0 computes: any of it may contain sums.
        mx.eval(self._gather(self.sessions[number].read(tokens, bool(last))))

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
            mx.eval(self._gather(sessions[0].verify(proposals[0])))
            return
        self._batch = self._batch or BatchVerifier(self._target)
        mx.eval(self._gather(self._batch.verify(sessions, proposals)))

    def _checkpoint(self, of: Numbers) -> None:
        self._checkpoints[of[1]] = self.sessions[of[0]].checkpoint()

    def _store(self, of: Numbers) -> None:
        session, start = self.sessions[of[0]], decode_optional(of[2])
        found = session.state() if start is None else session.rows(start, of[3])
        piece = {name: mx.contiguous(x) for name, x in found.items()}
        mx.async_eval(piece)
        self._pieces[of[1]] = piece

    def _restore(self, of: Numbers) -> None:
        number, position, room, state, *pieces = of
        stored = decode_optional(state)
        rows = [self._pieces[piece] for piece in pieces]
        self.sessions[number].restore(
            position, rows, {} if stored is None else self._pieces[stored], room
        )
