"""The channel between the ranks: one message per forward.

A message holds what rank 0 has done to its sessions since the last one, and then a forward that all
ranks run, as JSON. Its bytes are sent as integers, in a sum to which all ranks but 0 add zeros.
Every backend of MLX has that operation, so the messages need no other address, port or protocol
than the forwards.

An operation is [number, object, method, *arguments]: call a method of an object that every rank has
under the same number, and keep what it returns under a new number. Arguments that are such objects
are {"number": N}. Without a method, the object is forgotten.
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
NO_ANSWER = "A machine of the cluster does not answer any more"
# The last element of a message.
READ = "read"  # a forward of a prompt's tokens
VERIFY = "verify"  # a forward of drafts
HEARTBEAT = "heartbeat"  # nothing to do for REST_SECONDS
STOP = "stop"  # no message follows
REST_SECONDS = 0.2  # a rank that waits in a sum keeps a core busy
TARGET = 0  # the target's number
NUMBER = "number"  # the key of an object's number in an argument

Operation = Sequence[Any]


class Channel:
    """Connects all ranks.

    Args:
        group: MLX's group of them.
        pipeline: whether each rank has taps of its own layers only.

    Attributes:
        sums: how many were made for messages and meetings.
    """

    def __init__(self, group: mx.distributed.Group, pipeline: bool = False) -> None:
        self.group = group
        self._pipeline = pipeline
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
        # JSON, with spaces at its end up to a whole number of int32.
        text = json.dumps(list(operations), separators=(",", ":"), default=int).encode()
        content = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        words = np.array([len(content), *content], np.int32)  # the first word is the length
        for start in range(0, len(words), WORDS):
            part = np.zeros(WORDS, np.int32)
            part[: len(words) - start] = words[start : start + WORDS]
            self._sum(part)

    def receive(self) -> list[list[Any]]:
        """Wait for the next message of rank 0."""
        words = self._sum(np.zeros(WORDS, np.int32))
        while len(words) <= words[0]:
            words = np.concatenate([words, self._sum(np.zeros(WORDS, np.int32))])
        operations: list[list[Any]] = json.loads(words[1 : words[0] + 1].tobytes())
        return operations

    def gather(self, result: Any) -> Any:
        """Complete the taps of a forward's (logits, taps), or of a list of them, from all ranks.

        Every rank of a pipeline adds its own layers' taps and zeros for the others, in one sum
        after everything that the forward itself sends.
        """
        pairs = result if isinstance(result, list) else [result]
        if not self._pipeline or not any(tap.size for _, tap in pairs):
            return result
        logits = [x for x, _ in pairs if x is not None]
        features = mx.concatenate([tap.reshape(-1) for _, tap in pairs if tap.size])
        features = mx.depends(features, logits) if logits else features
        total = mx.distributed.all_sum(features, group=self.group)
        whole = []
        start = 0
        for logit, tap in pairs:
            part = total[start : start + tap.size].reshape(tap.shape) if tap.size else tap
            whole.append((logit, part))
            start += tap.size
        return whole if isinstance(result, list) else whole[0]

    def _sum(self, words: np.ndarray) -> np.ndarray:
        """Return the sum [N] over all ranks, after waiting for them."""
        self.sums += 1
        return np.array(mx.distributed.all_sum(mx.array(words), group=self.group, stream=mx.cpu))
