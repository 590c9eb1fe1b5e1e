"""Measures sums over the machines, by the ranks themselves.

A chain of sums depend on each other, with work for the device between them, as in a forward. So the
device's waiting time is included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from ..errors import ClusterError
from ..validation import ErrorWrapper
from .channel import Channel, Operation, OperationKind

ROWS = 16  # of a drafted step
LARGE_BYTES = 2**23
MIN_SUMS, MAX_SUMS = 2, 64  # of a chain
CHAIN_SECONDS = 0.25
CHAINS = 3


@dataclass(frozen=True)
class LinkTimes:
    """Measured seconds.

    Attributes:
        machines: how many took part.
        width: half-precision numbers of a row.
        row, rows: for a sum of one row, and of 16.
        message: for the message before a forward.
        bandwidth: bytes per second, in a sum of 8 MiB.
    """

    machines: int
    width: int
    row: float
    rows: float
    message: float
    bandwidth: float

    def summing(self, size: float) -> float:
        """Estimated seconds for a sum of this many bytes."""
        return self.row + size / self.bandwidth


def measure_link(channel: Channel, width: int) -> LinkTimes:
    """Measure together with all other ranks; returns this rank's times.

    Args:
        channel: to the others.
        width: numbers of a row, such as a model's hidden size.

    Raises `ClusterError` when another rank is lost.
    """
    with ErrorWrapper(ClusterError, "The machines do not sum together"):
        row, rows = (_chain(channel, mx.zeros((n, width), mx.bfloat16)) for n in (1, ROWS))
        large = _chain(channel, mx.zeros((LARGE_BYTES // 4,), mx.float32))
        message = _timed(channel, lambda count: _send_messages(channel, count))
    bandwidth = LARGE_BYTES / large
    return LinkTimes(channel.size, width, row, rows, message, bandwidth)


def _chain(channel: Channel, x: mx.array) -> float:
    """Seconds for one sum of an array of this shape."""

    def run(count: int) -> None:
        total = x
        for _ in range(count):
            total = mx.distributed.all_sum(total * 0.5, group=channel.group)
        mx.eval(total)

    return _timed(channel, run)


def _send_messages(channel: Channel, count: int) -> None:
    for _ in range(count):
        if channel.rank == 0:
            channel.send([Operation(OperationKind.HEARTBEAT)])
        else:
            list(channel.receive())


def _timed(channel: Channel, run: Callable[[int], None]) -> float:
    """Seconds for each of the `count` operations of `run(count)`; rank 0 chooses the count."""
    run(MIN_SUMS)
    start = time.perf_counter()
    run(MIN_SUMS)
    each = (time.perf_counter() - start) / MIN_SUMS
    wanted = max(MIN_SUMS, min(MAX_SUMS, int(CHAIN_SECONDS / each)))
    count = channel.meet(wanted)[0]
    took = []
    for _ in range(CHAINS):
        start = time.perf_counter()
        run(count)
        took.append((time.perf_counter() - start) / count)
    return median(took)
