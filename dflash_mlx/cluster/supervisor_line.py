"""The line between a rank and the supervisor that started it: each learns when the other is gone.

Native waits hear no signal. So a rank whose supervisor is gone ends its process at once, and the
supervisor ends a rank that sends nothing any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

HEARTBEAT_SECONDS = 1.0
HEARTBEAT, LOADED, MET, READY = "heartbeat", "loaded", "met", "ready"
LOST, FAILED = "lost", "failed"  # with a reason
GONE_CODE = 1


class SupervisorLine:
    """A rank's end of the line.

    Args:
        reading, writing: file descriptors, which may be the same.

    Attributes:
        lost: called, in a thread, with the supervisor's reason for ending the cluster.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._lock = threading.Lock()
        self.lost: Callable[[str], Any] = lambda problem: None
        for work in (self._read, self._send_heartbeats):
            threading.Thread(target=work, name="dflash-line", daemon=True).start()

    def send(self, word: str, reason: str = "") -> None:
        """Send one line."""
        try:
            with self._lock:
                os.write(self._writing, f"{word} {' '.join(reason.split())}\n".encode())
        except OSError:
            os._exit(GONE_CODE)

    def _send_heartbeats(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_SECONDS):
            self.send(HEARTBEAT)

    def _read(self) -> None:
        with open(self._reading, "rb", buffering=0, closefd=False) as line:
            while heard := line.readline():
                self.lost(heard.decode(errors="replace").strip())
        os._exit(GONE_CODE)
