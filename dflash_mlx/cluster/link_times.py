"""How long sums over machines take, measured by the ranks themselves.

The sums of a chain depend on each other, with something for the device to do between them, as in a
forward: so what a device waits for is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from ..errors import ClusterError
from ..validation import ErrorWrapper
from .wire import Kind, Told, Wire

ROWS = 16  # of a drafted round
LARGE_BYTES = 2**23
FIRST, MOST = 2, 64  # sums of a chain
CHAIN_SECONDS = 0.25
CHAINS = 3


@dataclass(frozen=True)
class LinkTimes:
    """What was measured, in seconds.

    Attributes:
        machines: how many took part.
        width: numbers of a row, in half precision.
        row, rows: a sum of one of these, and of 16.
        message: what rank 0 tells before a forward.
        bandwidth: bytes per second, of a sum of 8 MiB.
    """

    machines: int
    width: int
    row: float
    rows: float
    message: float
    bandwidth: float

    def summing(self, size: float) -> float:
        """Of so many bytes: an estimate."""
        return self.row + size / self.bandwidth


def measure_link(wire: Wire, width: int) -> LinkTimes:
    """As every rank, all at once; the times are this rank's.

    Args:
        wire: to the others.
        width: numbers of a row, as of a model's hidden states.

    Raises `ClusterError` when another one is lost.
    """
    with ErrorWrapper(ClusterError, "The machines do not sum together"):
        row, rows = (_chain(wire, mx.zeros((n, width), mx.bfloat16)) for n in (1, ROWS))
        large = _chain(wire, mx.zeros((LARGE_BYTES // 4,), mx.float32))
        message = _timed(wire, lambda count: _tell(wire, count))
    bandwidth = LARGE_BYTES / large
    return LinkTimes(wire.size, width, row, rows, message, bandwidth)


def _chain(wire: Wire, x: mx.array) -> float:
    """Seconds of one sum of an array of this shape."""

    def run(count: int) -> None:
        total = x
        for _ in range(count):
            total = mx.distributed.all_sum(total * 0.5, group=wire.group)
        mx.eval(total)

    return _timed(wire, run)


def _tell(wire: Wire, count: int) -> None:
    for _ in range(count):
        if wire.rank == 0:
            wire.cast([Told(Kind.BEAT)])
        else:
            list(wire.receive())


def _timed(wire: Wire, run: Callable[[int], None]) -> float:
    """Seconds of one of what `run` does so many times; rank 0 says how often."""
    run(FIRST)
    start = time.perf_counter()
    run(FIRST)
    each = (time.perf_counter() - start) / FIRST
    wanted = max(FIRST, min(MOST, int(CHAIN_SECONDS / each)))
    count = wire.meet(wanted)[0]
    took = []
    for _ in range(CHAINS):
        start = time.perf_counter()
        run(count)
        took.append((time.perf_counter() - start) / count)
    return median(took)
