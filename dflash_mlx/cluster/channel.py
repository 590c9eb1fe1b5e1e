"""The channel between the ranks: one message per step.

A message holds the session operations since the last one and then a forward that all ranks run, as
JSON. Its bytes are sent as integers, in a sum to which all ranks but 0 add zeros. Every backend of
MLX has that operation, so the messages need no other address, port or protocol than the forwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

WORDS = 4096  # int32 of one sum; a step of 32 requests and 17 rows each takes less
# What MLX raises when ranks do not reach each other, or when a file that names them is broken.
MLX_ERRORS = (RuntimeError, ValueError, OSError)
HEARTBEAT, STOP = "heartbeat", "stop"  # nothing to do; the last message

Operation = Sequence[Any]  # the name of one of `RankWorker`'s operations, and its arguments


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
        return self._sum(np.array(words, np.int32)).tolist()

    def send(self, operations: Iterable[Operation]) -> None:
        """Send a message, as rank 0."""
        text = json.dumps([*operations], separators=(",", ":"), default=int).encode()
        content = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        words = np.array([len(content), *content], np.int32)
        for start in range(0, len(words), WORDS):
            part = np.zeros(WORDS, np.int32)
            part[: len(words) - start] = words[start : start + WORDS]
            self._sum(part)

    def receive(self) -> list[Operation]:
        """Wait for the next message of rank 0."""
        words = self._sum(np.zeros(WORDS, np.int32))
        while len(words) <= words[0]:
            words = np.concatenate([words, self._sum(np.zeros(WORDS, np.int32))])
        operations: list[Operation] = json.loads(words[1 : words[0] + 1].tobytes())
        return operations

    def _sum(self, words: np.ndarray) -> np.ndarray:
        """The sum [N] over all ranks; waits for them."""
        self.sums += 1
        return np.array(mx.distributed.all_sum(mx.array(words), group=self.group, stream=mx.cpu))
