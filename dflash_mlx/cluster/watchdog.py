"""Whether what machines do together goes on.

A machine that stops, or a network that takes nothing more, raises no error: whoever waits for it in
a sum waits for ever, in native code that no signal ends. So what is waited for has a limit, by how
long such things have taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STALL_SECONDS = 20.0  # clients are to have an error within 30
SLOWER = 4  # times the longest so far, where that is longer
CHECK_SECONDS = 0.25


class Watch:
    """Looks after one thread's waiting.

    Args:
        limit: seconds that anything may take.
        stalled: called once, in a thread of its own, with the seconds that something has taken.
    """

    def __init__(self, limit: float, stalled: Callable[[float], None]) -> None:
        self._limit, self._stalled = limit, stalled
        self._longest = 0.0
        self._begun: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="dflash-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """What is done inside ends within the limit."""
        begun = self._begun = time.monotonic()
        try:
            yield
        finally:
            self._begun = None
            self._longest = max(self._longest, time.monotonic() - begun)

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(min(CHECK_SECONDS, self._limit / 4)):
            begun = self._begun
            taken = 0.0 if begun is None else time.monotonic() - begun
            if taken > max(self._limit, SLOWER * self._longest):
                self._stalled(taken)
                return
