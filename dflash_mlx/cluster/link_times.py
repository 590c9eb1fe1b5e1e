"""Measures sums over the machines, by the ranks themselves.

The sums of a chain depend on each other, with work for the device between them, as in a forward. So
the device's waiting time is included.
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
SUMS = 8  # of a chain, or messages of a series
SERIES = 3


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


def measure_link(channel: Channel, width: int) -> LinkTimes:
    """Measure together with all other ranks; returns this rank's times.

    Args:
        channel: to the others.
        width: numbers of a row, such as a model's hidden size.

    Raises `ClusterError` when another rank is lost.
    """
    with ErrorWrapper(ClusterError, "The machines do not sum together"):
        row, rows = (_time_sums(channel, mx.zeros((n, width), mx.bfloat16)) for n in (1, ROWS))
        large = _time_sums(channel, mx.zeros((LARGE_BYTES // 4,), mx.float32))
        message = _timed(lambda: _exchange_message(channel), SUMS)
    return LinkTimes(channel.size, width, row, rows, message, LARGE_BYTES / large)


def _time_sums(channel: Channel, x: mx.array) -> float:
    """Seconds for one sum of an array of this shape."""

    def chain() -> None:
        total = x
        for _ in range(SUMS):
            total = mx.distributed.all_sum(total * 0.5, group=channel.group)
        mx.eval(total)

    return _timed(chain, 1) / SUMS


def _exchange_message(channel: Channel) -> None:
    if channel.rank == 0:
        channel.send([Operation(OperationKind.HEARTBEAT)])
    else:
        list(channel.receive())


def _timed(run: Callable[[], None], count: int) -> float:
    """Seconds for one `run()`: the median of a few series of `count`, after a first one."""
    times = []
    for _ in range(SERIES + 1):
        start = time.perf_counter()
        for _ in range(count):
            run()
        times.append((time.perf_counter() - start) / count)
    return median(times[1:])
