"""Handle Ctrl-C and SIGTERM for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call `handler`, then restore the old handlers. Main thread only."""
    before = {sent: signal.signal(sent, handler) for sent in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sent, earlier in before.items():
            signal.signal(sent, earlier)
