"""The line between a rank and the supervisor that started it: each learns when the other is gone.

Native waits hear no signal. So a rank whose supervisor is gone ends its process at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

READY = "ready"  # a server takes requests
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
        self.lost: Callable[[str], Any] = lambda problem: None
        threading.Thread(target=self._read, name="dflash-line", daemon=True).start()

    def send(self, word: str, reason: str = "") -> None:
        """Send one line."""
        try:
            os.write(self._writing, f"{word} {' '.join(reason.split())}\n".encode())
        except OSError:
            os._exit(GONE_CODE)

    def _read(self) -> None:
        with open(self._reading, "rb", buffering=0, closefd=False) as line:
            while heard := line.readline():
                self.lost(heard.decode(errors="replace").strip())
        os._exit(GONE_CODE)
