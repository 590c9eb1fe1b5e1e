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
from .channel import HEARTBEAT, MLX_ERRORS, STOP, Channel
from .leader import LOST, REST_SECONDS
from .watchdog import Watchdog


class RankWorker:
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
        self._stored: dict[int, Checkpoint | Arrays] = {}
        self.sessions: dict[int, TargetSession] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            HEARTBEAT: lambda: time.sleep(REST_SECONDS),
            STOP: lambda: None,
            "start": self._start,
            "read": self._read,
            "verify": self._verify,
            "commit": lambda session, kept: self.sessions[session].commit(kept),
            "trim": lambda session, position: self.sessions[session].trim_to(position),
            "checkpoint": self._checkpoint,
            "rewind": self._rewind,
            "store": self._store,
            "restore": self._restore,
            "drop": self._drop,
        }

    def run(self, watchdog: Watchdog) -> None:
        """Run rank 0's operations until it stops. Raises `ClusterError` if it is lost.

        Args:
            watchdog: notices a rank 0 that sends no more messages.
        """
        name = ""
        while name != STOP:
            with ErrorWrapper(ClusterError, LOST, MLX_ERRORS), watchdog.watching():
                for name, *arguments in self._channel.receive():
                    self._operations[name](*arguments)

    def _start(self, session: int, kv_bits: int | None, tap_layers: list[int]) -> None:
        self.sessions[session] = self._target.start(tap_layers, kv_bits)

    def _read(self, session: int, tokens: list[int], last: bool) -> None:
        # Compute all that rank 0 computes: any of it may contain sums.
        mx.eval(self._gather(self.sessions[session].read(tokens, last)))

    def _verify(self, drafts: Sequence[tuple[int, list[int], list[int]]]) -> None:
        """Session, tokens and parents of each draft; a chain has no parents."""
        sessions = [self.sessions[session] for session, _, _ in drafts]
        proposals = [Proposal(tokens, tuple(parents)) for _, tokens, parents in drafts]
        if len(sessions) == 1:
            mx.eval(self._gather(sessions[0].verify(proposals[0])))
            return
        self._batch = self._batch or BatchVerifier(self._target)
        mx.eval(self._gather(self._batch.verify(sessions, proposals)))

    def _checkpoint(self, session: int, number: int) -> None:
        self._stored[number] = self.sessions[session].checkpoint()

    def _rewind(self, session: int, number: int) -> None:
        checkpoint: Any = self._stored[number]
        self.sessions[session].rewind(checkpoint)

    def _store(self, session: int, number: int, start: int | None, end: int) -> None:
        """Store rows, or the state without a `start`."""
        of = self.sessions[session]
        found = of.state() if start is None else of.rows(start, end)
        piece = {name: mx.contiguous(x) for name, x in found.items()}
        mx.async_eval(piece)
        self._stored[number] = piece

    def _restore(
        self, session: int, position: int, room: int, state: int | None, pieces: list[int]
    ) -> None:
        rows: Any = [self._stored[piece] for piece in pieces]
        stored: Any = {} if state is None else self._stored[state]
        self.sessions[session].restore(position, rows, stored, room)

    def _drop(self, number: int) -> None:
        self.sessions.pop(number, None)
        self._stored.pop(number, None)
