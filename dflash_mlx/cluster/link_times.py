"""Measures sums over the machines, by the ranks themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from ..errors import ClusterError
from ..validation import ErrorWrapper

ROWS = 16  # of a drafted step
LARGE_BYTES = 2**23
SUMS = 8  # that depend on each other, as in a forward
SERIES = 3


@dataclass(frozen=True)
class LinkTimes:
    """Measured seconds.

    Attributes:
        machines: how many took part.
        width: half-precision numbers of a row.
        row, rows: for a sum of one row, and of 16.
        bandwidth: bytes per second, in a sum of 8 MiB.
    """

    machines: int
    width: int
    row: float
    rows: float
    bandwidth: float


def measure_link(group: mx.distributed.Group, width: int) -> LinkTimes:
    """Measure together with all other ranks; returns this rank's times.

    Args:
        group: all ranks.
        width: numbers of a row, such as a model's hidden size.

    Raises `ClusterError` when another rank is lost.
    """
    with ErrorWrapper(ClusterError, "The machines do not sum together"):
        row, rows = (_time_sum(group, mx.zeros((n, width), mx.bfloat16)) for n in (1, ROWS))
        large = _time_sum(group, mx.zeros((LARGE_BYTES // 4,), mx.float32))
    return LinkTimes(group.size(), width, row, rows, LARGE_BYTES / large)


def _time_sum(group: mx.distributed.Group, x: mx.array) -> float:
    """Seconds for one sum of an array of this shape: the median of a few series, after a first.

    The device works between sums, so its waiting time is included.
    """
    times = []
    for _ in range(SERIES + 1):
        start, total = time.perf_counter(), x
        for _ in range(SUMS):
            total = mx.distributed.all_sum(total * 0.5, group=group)
        mx.eval(total)
        times.append((time.perf_counter() - start) / SUMS)
    return median(times[1:])
