"""The processes of a cluster, on this machine and, through ssh, on others."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from .hosts import Host, Hosts

MODULE = "dflash_mlx.cli.rank"
KILL_SECONDS = 5.0  # after SIGTERM, which a native wait does not hear


@dataclass(eq=False)
class ClusterProcess:
    """One process.

    Attributes:
        number: its rank.
        host: its machine.
        process: the process, or here the ssh that carries it.
        reading, writing: our end of its line, unbuffered.
    """

    number: int
    host: Host
    process: subprocess.Popen[bytes]
    reading: Any
    writing: Any

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.number} ({self.host.ssh})"

    @property
    def end(self) -> str:
        """How the process ended."""
        code = self.process.poll() or 0
        return f"{self.name} ended by signal {-code}" if code < 0 else f"{self.name} ended ({code})"


class ClusterProcesses:
    """All processes of a cluster, started once.

    Args:
        hosts: the machines.
        arguments: of the command that all of them run.
        listening: a socket for rank 0.
    """

    def __init__(
        self, hosts: Hosts, arguments: Sequence[str], listening: socket.socket | None = None
    ) -> None:
        self._arguments = list(arguments)
        self._lines: SimpleQueue[tuple[ClusterProcess, str, str]] = SimpleQueue()
        self.all: list[ClusterProcess] = []
        with ExitStack() as undo:
            undo.callback(self.end)
            for host, settings in zip(hosts.machines, hosts.launches(), strict=True):
                if self.all:
                    rank = self._start_other(host, settings)
                else:
                    rank = self._start_first(host, settings, listening)
                self.all.append(rank)
                Thread(target=self._read, args=(rank,), daemon=True).start()
            undo.pop_all()

    def _start_first(
        self, host: Host, settings: dict[str, Any], listening: socket.socket | None
    ) -> ClusterProcess:
        """Rank 0 keeps the terminal; its line is a socket."""
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno()] + ([] if listening is None else [listening.fileno()])
        settings = settings | {"line": inherited[0]}
        settings["listening"] = None if listening is None else inherited[1]
        with ours, theirs:
            process = subprocess.Popen(
                self._command(settings), pass_fds=inherited, start_new_session=True
            )
            line = ours.makefile("rwb", buffering=0)
        return ClusterProcess(settings["rank"], host, process, line, line)

    def _start_other(self, host: Host, settings: dict[str, Any]) -> ClusterProcess:
        """The line of any other rank is its stdin and stdout."""
        process = subprocess.Popen(
            host.command(self._command(settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        return ClusterProcess(settings["rank"], host, process, process.stdout, process.stdin)

    def _command(self, settings: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", MODULE, json.dumps(settings), *self._arguments]

    def _read(self, rank: ClusterProcess) -> None:
        """Read a rank's lines until it ends."""
        with suppress(OSError):  # it ended without reading all that we sent
            for line in rank.reading:
                word, _, reason = line.decode(errors="replace").strip().partition(" ")
                self._lines.put((rank, word, reason))

    def receive(self, seconds: float) -> list[tuple[ClusterProcess, str, str]]:
        """Lines that ranks send within this time: rank, word and reason."""
        lines = []
        with suppress(Empty):
            lines.append(self._lines.get(timeout=seconds))
            while True:
                lines.append(self._lines.get_nowait())
        return lines

    def send(self, rank: ClusterProcess, line: str) -> None:
        """Send a line to a rank, unless it has ended."""
        with suppress(OSError):
            rank.writing.write(f"{' '.join(line.split())}\n".encode())

    def wait(self, seconds: float, ranks: Sequence[ClusterProcess] = ()) -> None:
        """Wait until these ranks, or all, have ended, at most this long."""
        until = time.monotonic() + seconds
        for rank in ranks or self.all:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """End all processes: by SIGTERM, then by SIGKILL. Those behind ssh lose their line."""
        for rank in self.all:
            rank.process.terminate()
        self.wait(KILL_SECONDS)
        for rank in self.all:
            rank.process.kill()
            rank.process.wait()
            rank.writing.close()
