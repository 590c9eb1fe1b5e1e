"""A rank's line to the process that started it: each tells the other that it lives.

Native waits hear no signal. So a rank whose supervisor is gone ends itself, at once, and a rank
that says nothing any more is ended by its supervisor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

BEAT_SECONDS = 1.0
BEAT, LOADED, MET, READY, LOST = "beat", "loaded", "met", "ready", "lost"
FAILED = "failed"  # and why
GONE_CODE = 1


class Post:
    """A rank's end of the line.

    Args:
        reading, writing: file descriptors, which may be the same.

    Attributes:
        lost: called, in a thread, with what the supervisor says is wrong with another rank.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._lock = threading.Lock()
        self.lost: Callable[[str], Any] = lambda problem: None
        for work in (self._hear, self._beat):
            threading.Thread(target=work, name="dflash-post", daemon=True).start()

    def tell(self, word: str, more: str = "") -> None:
        """Say something, in a line."""
        try:
            with self._lock:
                os.write(self._writing, f"{word} {' '.join(more.split())}\n".encode())
        except OSError:
            os._exit(GONE_CODE)

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(BEAT_SECONDS):
            self.tell(BEAT)

    def _hear(self) -> None:
        with open(self._reading, "rb", buffering=0, closefd=False) as line:
            while heard := line.readline():
                self.lost(heard.decode(errors="replace").strip())
        os._exit(GONE_CODE)
