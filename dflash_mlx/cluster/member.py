"""This process as one rank of a cluster, and its line to the supervisor that started it.

Each end of the line learns when the other is gone. Native waits hear no signal, so a rank whose
supervisor is gone ends its process at once.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

READY = "ready"  # a server takes requests
LOST = "lost"  # the other ranks are lost; with a reason
FAILED = "failed"  # this rank ends with an error; with a reason
GONE_CODE = 1
LOST_CODE = 1
MLX_RANK: Final = "MLX_RANK"
RANK_VARIABLES: Final = (MLX_RANK, "OMPI_COMM_WORLD_RANK")  # set by launchers of MLX


def rank() -> int | None:
    """The number of this process among several; None if no launcher of MLX started it."""
    for variable in RANK_VARIABLES:
        value = os.environ.get(variable)
        if value:
            return int(value)
    return None


class RankProcess:
    """This process, if a supervisor started it.

    Args:
        reading, writing: file descriptors of the line to the supervisor, which may be the same.
        listening: the file descriptor of a server's socket, on which the supervisor listens when
            this process does not.

    Attributes:
        lost: called, in a thread, with the supervisor's reason for ending the cluster.
    """

    def __init__(self, reading: int, writing: int, listening: int | None = None) -> None:
        self._reading = reading
        self._writing = writing
        self._listening = listening
        self.lost: Callable[[str], Any] = lambda problem: None
        threading.Thread(target=self._read, name="dflash-line", daemon=True).start()

    def send(self, word: str, reason: str = "") -> None:
        """Send the supervisor one line."""
        try:
            os.write(self._writing, f"{word} {' '.join(reason.split())}\n".encode())
        except OSError:
            os._exit(GONE_CODE)

    def inherited_socket(self) -> socket.socket | None:
        """The server's socket."""
        return None if self._listening is None else socket.socket(fileno=self._listening)

    def _read(self) -> None:
        with open(self._reading, "rb", buffering=0, closefd=False) as line:
            while heard := line.readline():
                self.lost(heard.decode(errors="replace").strip())
        os._exit(GONE_CODE)
