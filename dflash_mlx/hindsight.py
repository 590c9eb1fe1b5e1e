"""Judging drafts by the text they were a guess at, once it has gone on past them.

The text does not depend on what is drafted. So a draft that was cut short, or never verified at
all, can be scored as well as one that was: by waiting until the text has passed its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Hindsight(Generic[T]):
    """The drafts of one request that still wait for the text to reach their end."""

    def __init__(self) -> None:
        self._text: list[int] = []  # from the oldest waiting draft on
        self._start = 0  # where that is
        self._waiting: deque[tuple[int, int, T]] = deque()

    def add(self, length: int, draft: T) -> None:
        """Have `draft` wait for the `length` tokens that come next."""
        self._waiting.append((self._start + len(self._text), length, draft))

    def commit(self, tokens: Sequence[int]) -> Iterator[tuple[T, list[int]]]:
        """The text went on by `tokens`: each draft it has passed now, and the tokens there."""
        self._text += tokens
        while self._waiting:
            place, length, draft = self._waiting[0]
            begin = place - self._start
            if len(self._text) < begin + length:
                break
            self._waiting.popleft()
            yield draft, self._text[begin : begin + length]
        passed = self._waiting[0][0] - self._start if self._waiting else len(self._text)
        self._text, self._start = self._text[passed:], self._start + passed
