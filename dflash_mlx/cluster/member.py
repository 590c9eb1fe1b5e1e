"""This process as one rank of a cluster, and its line to the supervisor that started it.

Each end of the line learns when the other is gone. Native waits hear no signal, so a rank whose
supervisor is gone ends its process at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from ..errors import ClusterError, DFlashError

READY = "ready"  # a server takes requests
LOST, FAILED = "lost", "failed"  # with a reason
GONE_CODE = LOST_CODE = 1
MLX_RANK: Final = "MLX_RANK"
RANK_VARIABLES: Final = (MLX_RANK, "OMPI_COMM_WORLD_RANK")  # set by launchers of MLX


def rank() -> int | None:
    """The number of this process among several; None if no launcher of MLX started it."""
    found = next(filter(None, map(os.environ.get, RANK_VARIABLES)), None)
    return None if found is None else int(found)


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


@dataclass
class RankProcess:
    """A process that a supervisor started.

    Attributes:
        line: to the supervisor.
        listening: the file descriptor of a server's socket.
    """

    line: SupervisorLine
    listening: int | None = None

    def inherited_socket(self) -> socket.socket | None:
        """The server's socket, on which the supervisor listens when this process does not."""
        return None if self.listening is None else socket.socket(fileno=self.listening)


class Member:
    """This process as one of several that share a model.

    Args:
        process: how a supervisor started it; None if another launcher did.
        stall, pipeline: of `Cluster`.

    Attributes:
        cluster: all of them.
        end: called first, in any thread, when the others are lost; None ends the process at once
            if it waits for them.
        interrupted: whether Ctrl-C was pressed while this rank followed.

    Raises `ClusterError` if the others cannot be reached.
    """

    def __init__(self, process: RankProcess | None, stall: float, pipeline: bool = False) -> None:
        from .cluster import Cluster

        self.end: Callable[[DFlashError], Any] | None = None
        self.interrupted = False
        self._line, self._lost_once = None, threading.Lock()
        if process is not None:
            self._line = process.line
            process.line.lost = lambda problem: self._lost(DFlashError(problem), False)
        self.cluster = Cluster(stall, self._lost, self._met, pipeline=pipeline)
        if self.cluster.size == 1 and (rank() or process is not None):
            raise ClusterError(
                "MLX has joined no other machine: its backend does not work here. "
                "'dflash-mlx doctor --hosts FILE' says which one does."
            )

    def tell(self, word: str, reason: str = "") -> None:
        """Send a message to the supervisor, if there is one."""
        if self._line is not None:
            self._line.send(word, reason)

    def _met(self) -> None:
        if self.cluster.rank:  # from now on rank 0 decides when it is over
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True

    def _lost(self, error: DFlashError, stuck: bool) -> None:
        if not self._lost_once.acquire(blocking=False):
            return
        if self.end is not None:
            self.end(error)
        self.tell(LOST, str(error))
        if self.end is None and stuck:
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(LOST_CODE)
