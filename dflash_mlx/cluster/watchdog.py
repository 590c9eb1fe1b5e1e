"""A time limit for operations over the network.

A machine that stops, or a network that takes no more data, raises no error: a thread that waits for
it in a sum waits forever, in native code that no signal interrupts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STALL_SECONDS = 20.0  # clients should get an error within 30
SLOWEST_FACTOR = 4  # the limit is at least this multiple of the longest operation so far
CHECK_SECONDS = 0.25


class Watchdog:
    """Calls a function if an operation of one thread takes too long.

    Args:
        limit: seconds that an operation may take.
        stalled: called once, in the watchdog's thread, with the seconds since the operation began.
    """

    def __init__(self, limit: float, stalled: Callable[[float], None]) -> None:
        self._limit = limit
        self._stalled = stalled
        self._longest = 0.0
        self._started: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the operation in the body of the `with` statement."""
        started = time.monotonic()
        self._started = started
        try:
            yield
        finally:
            self._started = None
            self._longest = max(self._longest, time.monotonic() - started)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(min(CHECK_SECONDS, self._limit / 4)):
            started = self._started
            taken = 0.0 if started is None else time.monotonic() - started
            if taken > max(self._limit, SLOWEST_FACTOR * self._longest):
                self._stalled(taken)
                return
