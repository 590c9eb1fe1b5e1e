"""Ctrl-C and SIGTERM, for a while, in other hands."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `handler`; afterwards whom they called before. Main thread only."""
    before = {sent: signal.signal(sent, handler) for sent in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sent, earlier in before.items():
            signal.signal(sent, earlier)
