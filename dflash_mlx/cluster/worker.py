"""A worker is any rank but 0: it repeats the operations of rank 0 on its part of the model.

A worker has no drafter, no sampler and no socket, and decides nothing. Only rank 0 looks at logits,
so ranks whose sums round differently cannot diverge.
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
    """One rank's part of the target, and the objects that rank 0's operations created here.

    Args:
        channel: the channel to the other ranks.
        target: this rank's part.

    Attributes:
        objects: the target, sessions, checkpoints and cached arrays, by rank 0's numbers.
    """

    def __init__(self, channel: Channel, target: Target) -> None:
        self._channel = channel
        self._target = target
        self._slots: KVSlots | None = None  # created for the first step of two requests
        self.objects: dict[int, Any] = {TARGET: target}

    def run(self, watchdog: Watchdog) -> None:
        """Run rank 0's operations until it stops. Raises `ClusterError` if it is lost.

        Args:
            watchdog: notices when rank 0 stops sending messages.
        """
        forward: list[Any] = []
        while forward != [STOP]:
            with ErrorWrapper(ClusterError, NO_ANSWER, MLX_ERRORS), watchdog.watching():
                *operations, forward = self._channel.receive()
                for number, owner, method, *arguments in operations:
                    self._repeat(number, owner, method=method, arguments=arguments)
                if forward == [HEARTBEAT]:
                    time.sleep(REST_SECONDS)
                elif forward != [STOP]:
                    # Compute all that rank 0 computes, because any of it may contain sums.
                    mx.eval(self._channel.gather(self._forward(*forward)))

    def _repeat(self, number: int, owner: int, *, method: str | None, arguments: list[Any]) -> None:
        """Call a method of the object `owner`, and keep the result under `number`.

        Without a method, forget the object.
        """
        if method is None:
            self.objects.pop(owner, None)
            return
        bound_method = getattr(self.objects[owner], method)
        result = bound_method(*map(self._with_objects, arguments))
        if isinstance(result, dict):  # views of caches that later operations change
            result = {name: mx.contiguous(x) for name, x in result.items()}
            mx.async_eval(result)
        if result is not None:
            self.objects[number] = result

    def _with_objects(self, argument: Any) -> Any:
        """Replace the numbers in an argument by this rank's objects."""
        if isinstance(argument, list):
            return list(map(self._with_objects, argument))
        if isinstance(argument, dict):
            return self.objects[argument[NUMBER]] if argument else {}
        return argument

    def _forward(self, kind: str, *arguments: Any) -> Any:
        """Read a prompt's tokens in a session, or verify the drafts of one or more sessions."""
        if kind == READ:
            session, tokens, last = arguments
            span = Span(self.objects[session], Proposal(tokens), ends_prompt=last)
            return self._target.read([span])
        # For each draft: session, tokens and parents. A chain has no parents.
        drafts, logits = arguments
        spans = [
            Span(self.objects[session], Proposal(tokens, tuple(parents)))
            for session, tokens, parents in drafts
        ]
        if len(spans) > 1 and self._slots is None and self._target.sharing is not None:
            self._slots = KVSlots(self._target.sharing.slot_layers)
        return self._target.forward(Rows(spans, slots=self._slots), logits)
