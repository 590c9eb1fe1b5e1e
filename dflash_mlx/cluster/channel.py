"""The channel between the ranks: one message per step, in integers.

A message holds the session operations since the last one and then a forward that all ranks run. It
is sent as a sum to which all ranks but 0 add zeros. Every backend of MLX has that operation, so the
messages need no other address, port or protocol than the forwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import mlx.core as mx
import numpy as np

WORDS = 4096  # int32 of one sum; a step of 32 requests and 17 rows each takes 1,700
_NONE = -1


class OperationKind(IntEnum):
    """What to do, and the integers that come with it."""

    HEARTBEAT = 1  # nothing to do
    STOP = 2  # the last message
    START = 3  # session, kv_bits or -1, tapped layers
    PREFILL = 4  # session, whether it is a prompt's last forward, tokens
    VERIFY = 5  # per session: itself, rows, whether they are a chain, tokens, a tree's parents
    COMMIT = 6  # session, kept rows
    TRIM = 7  # session, position
    CHECKPOINT = 8  # session, number of the checkpoint
    REWIND = 9  # session, number of the checkpoint
    DROP_CHECKPOINT = 10  # number of a checkpoint
    DROP_SESSION = 11  # session
    STORE = 12  # session, number of the piece, start, end; start is -1 for a state
    DROP_PIECE = 13  # number of a piece
    RESTORE = 14  # session, position, room, number of the state or -1, numbers of pieces


class Operation(NamedTuple):
    """One operation of a message."""

    kind: OperationKind
    numbers: Sequence[int] = ()


class Channel:
    """Connects all ranks.

    Attributes:
        group: MLX's group of them.
        sums: how many were made for messages and meetings.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.sums = 0

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()

    def meet(self, word: int = 0) -> list[int]:
        """Exchange one integer with all ranks, and wait for them. Returns them by rank."""
        words = [word if rank == self.rank else 0 for rank in range(self.size)]
        return self._sum(np.array(words, np.int32))

    def send(self, operations: Iterable[Operation]) -> None:
        """Send a message, as rank 0."""
        words = [0]
        for kind, numbers in operations:
            words += (kind, len(numbers), *numbers)
        words[0] = len(words)
        for start in range(0, len(words), WORDS):
            part = np.zeros(WORDS, np.int32)
            part[: len(words) - start] = words[start : start + WORDS]
            self._sum(part)

    def receive(self) -> Iterator[Operation]:
        """Wait for the next message of rank 0."""
        words = self._sum(np.zeros(WORDS, np.int32))
        while len(words) < words[0]:
            words += self._sum(np.zeros(WORDS, np.int32))
        start = 1
        while start < words[0]:
            kind, count = words[start : start + 2]
            start += 2 + count
            yield Operation(OperationKind(kind), words[start - count : start])

    def _sum(self, words: np.ndarray) -> list[int]:
        """The sum [N] over all ranks; waits for them."""
        self.sums += 1
        total = mx.distributed.all_sum(mx.array(words), group=self.group, stream=mx.cpu)
        numbers: list[int] = total.tolist()  # type: ignore[assignment]
        return numbers


def encode_optional(number: int | None) -> int:
    """None as an integer of a message."""
    return _NONE if number is None else number


def decode_optional(word: int) -> int | None:
    """The reverse of `encode_optional`."""
    return None if word == _NONE else word
