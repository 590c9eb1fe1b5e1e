"""Counting what goes between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from dflash_mlx.cluster.wire import Kind, Told, Wire

OPERATIONS = ("all_sum", "all_gather", "send", "recv_like")


class Counting:
    """Counts the messages of a wire by what they are about, and the sums that they take."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._cast = wire, wire.cast
        self.messages: Counter[Kind] = Counter()
        self.sums = 0
        wire.cast = self.cast  # type: ignore[method-assign]

    def cast(self, operations: Iterable[Told]) -> None:
        told, before = list(operations), self._wire.casts
        self._cast(told)
        if told[-1].kind is not Kind.BEAT:
            self.messages[told[-1].kind] += 1
            self.sums += self._wire.casts - before


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
