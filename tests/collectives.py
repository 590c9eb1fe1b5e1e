"""Counting what goes between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from dflash_mlx.cluster.channel import HEARTBEAT, Channel, Operation

OPERATIONS = ("all_sum", "all_gather", "send", "recv_like")


class Counting:
    """Counts the messages of a channel by their last operation, and their sums."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._send = channel, channel.send
        self.messages: Counter[str] = Counter()
        self.sums = 0
        channel.send = self.send  # type: ignore[method-assign]

    def send(self, operations: Iterable[Operation]) -> None:
        told, before = list(operations), self._channel.sums
        self._send(told)
        if (name := told[-1][0]) != HEARTBEAT:
            self.messages[name] += 1
            self.sums += self._channel.sums - before


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The operations over ranks that are built inside, by their names."""
    own = {name: getattr(mx.distributed, name) for name in OPERATIONS}
    count: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def call(*of: Any, **settings: Any) -> mx.array:
            count[name] += 1
            return own[name](*of, **settings)

        return call

    try:
        for name in OPERATIONS:
            setattr(mx.distributed, name, counting(name))
        yield count
    finally:
        for name, function in own.items():
            setattr(mx.distributed, name, function)
