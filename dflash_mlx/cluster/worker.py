"""Every rank but the first: it repeats on its part of the model what rank 0 does.

It has no drafter, no sampler and no socket, and decides nothing. So ranks whose sums round
differently cannot diverge: only rank 0 looks at logits.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from ..errors import ClusterError
from ..proposal import Proposal
from ..targets import Target
from ..targets.kv_slots import KVSlots
from ..targets.rows import Rows
from ..targets.span import Span
from ..validation import ErrorWrapper
from .channel import (
    HEARTBEAT,
    MLX_ERRORS,
    NO_ANSWER,
    NUMBER,
    READ,
    REST_SECONDS,
    STOP,
    TARGET,
    Channel,
)
from .watchdog import Watchdog


class RankWorker:
    """One rank's part of the target, and what rank 0's operations have made of it.

    Args:
        channel: to the other ranks.
        target: this rank's part.

    Attributes:
        objects: the target, sessions, checkpoints and cached arrays, by rank 0's numbers.
    """

    def __init__(self, channel: Channel, target: Target) -> None:
        self._channel, self._target = channel, target
        self._slots: KVSlots | None = None  # created for the first step of two requests
        self.objects: dict[int, Any] = {TARGET: target}

    def run(self, watchdog: Watchdog) -> None:
        """Run rank 0's operations until it stops. Raises `ClusterError` if it is lost.

        Args:
            watchdog: notices a rank 0 that sends no more messages.
        """
        forward: list[Any] = []
        while forward != [STOP]:
            with ErrorWrapper(ClusterError, NO_ANSWER, MLX_ERRORS), watchdog.watching():
                *operations, forward = self._channel.receive()
                for number, of, method, *arguments in operations:
                    self._repeat(number, of, method, arguments)
                if forward == [HEARTBEAT]:
                    time.sleep(REST_SECONDS)
                elif forward != [STOP]:
                    # Compute all that rank 0 computes: any of it may contain sums.
                    mx.eval(self._channel.gather(self._forward(*forward)))

    def _repeat(self, number: int, of: int, method: str | None, arguments: list[Any]) -> None:
        """Call an object's method and keep what it returns; without a method, forget the object."""
        if method is None:
            self.objects.pop(of, None)
            return
        found = getattr(self.objects[of], method)(*map(self._own, arguments))
        if isinstance(found, dict):  # arrays of caches that go on changing
            found = {name: mx.contiguous(x) for name, x in found.items()}
            mx.async_eval(found)
        if found is not None:
            self.objects[number] = found

    def _own(self, argument: Any) -> Any:
        """An argument with this rank's objects in place of their numbers."""
        if isinstance(argument, list):
            return [*map(self._own, argument)]
        if isinstance(argument, dict):
            return self.objects[argument[NUMBER]] if argument else {}
        return argument

    def _forward(self, kind: str, *arguments: Any) -> Any:
        """Read a prompt's tokens in a session, or verify drafts of one or several."""
        if kind == READ:
            session, tokens, last = arguments
            span = Span(self.objects[session], Proposal(tokens), ends_prompt=last)
            return self._target.read([span])
        (drafts,) = arguments  # session, tokens and parents of each; a chain has no parents
        spans = [
            Span(self.objects[session], Proposal(tokens, tuple(parents)))
            for session, tokens, parents in drafts
        ]
        if len(spans) > 1 and self._slots is None and self._target.sharing is not None:
            self._slots = KVSlots(self._target.sharing.slot_layers)
        return self._target.forward(Rows(spans, slots=self._slots))
