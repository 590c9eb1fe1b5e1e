"""Handle Ctrl-C and SIGTERM for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` on SIGINT and SIGTERM, then restore the old handlers. Main thread only."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
