"""What rank 0 tells the other ranks: one message a round, in whole numbers.

A message is what has been done to sessions since the last one (begun, committed, cut, dropped) and,
last, a forward that all ranks run. It is sent as a sum of which all parts but rank 0's are zero:
the one operation that every backend of MLX has, over the links that carry the forwards, so there
are no further addresses, ports or names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import mlx.core as mx
import numpy as np

WORDS = 4096  # int32 of one sum; a round of 32 requests and 17 rows each has 1,700
_NONE = -1


class Kind(IntEnum):
    """What is done, and the numbers that say to what."""

    BEAT = 1  # nothing: rank 0 is there
    STOP = 2  # nothing comes any more
    START = 3  # session, kv_bits or -1, tapped layers
    READ = 4  # session, whether it is a prompt's last forward, tokens
    VERIFY = 5  # per session: itself, rows, whether they are a chain, tokens, a tree's parents
    COMMIT = 6  # session, kept rows
    CUT = 7  # session, position
    MARK = 8  # session, the mark's number
    REWIND = 9  # session, the mark's number
    FORGET = 10  # a mark's number
    DROP = 11  # session
    KEEP = 12  # session, the piece's number, start, end; of a state start is -1
    FREE = 13  # a piece's number
    RESTORE = 14  # session, position, room, the state's number or -1, pieces' numbers


class Told(NamedTuple):
    """An operation."""

    kind: Kind
    numbers: Sequence[int] = ()


class Wire:
    """The group of all ranks.

    Attributes:
        group: MLX's.
        casts: sums so far, a message's or a meeting's.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.casts = 0

    @property
    def rank(self) -> int:
        """This process's."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many there are."""
        return self.group.size()

    def meet(self, word: int = 0) -> list[int]:
        """Wait until all ranks have come here, each with a word; all words by rank."""
        words = [word if rank == self.rank else 0 for rank in range(self.size)]
        return self._sum(np.array(words, np.int32))

    def cast(self, operations: Iterable[Told]) -> None:
        """Tell the others, as rank 0."""
        words = [0, *_words(operations)]
        words[0] = len(words)
        for start in range(0, len(words), WORDS):
            part = np.zeros(WORDS, np.int32)
            part[: len(words) - start] = words[start : start + WORDS]
            self._sum(part)

    def receive(self) -> Iterator[Told]:
        """What rank 0 tells next."""
        words = self._sum(np.zeros(WORDS, np.int32))
        while len(words) < words[0]:
            words += self._sum(np.zeros(WORDS, np.int32))
        return _operations(words[1 : words[0]])

    def _sum(self, words: np.ndarray) -> list[int]:
        """The sum [N] over all ranks; this waits for them."""
        self.casts += 1
        total = mx.distributed.all_sum(mx.array(words), group=self.group, stream=mx.cpu)
        numbers: list[int] = total.tolist()  # type: ignore[assignment]
        return numbers


def _words(operations: Iterable[Told]) -> Iterator[int]:
    for kind, numbers in operations:
        yield from (kind, len(numbers), *numbers)


def _operations(words: Sequence[int]) -> Iterator[Told]:
    start = 0
    while start < len(words):
        kind, count = words[start : start + 2]
        start += 2 + count
        yield Told(Kind(kind), words[start - count : start])


def optional(number: int | None) -> int:
    """A number that may be left out, as a word."""
    return _NONE if number is None else number


def given(word: int) -> int | None:
    """The number that a word stands for."""
    return None if word == _NONE else word
