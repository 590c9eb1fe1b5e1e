"""The processes of a cluster, on this machine and, through ssh, on others."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from .hosts import SSH, Host, Hosts
from .supervisor_line import HEARTBEAT

MODULE = "dflash_mlx.cli.rank"
KILL_SECONDS = 5.0  # after SIGTERM, which a native wait does not hear
SSH_SECONDS = 15.0


@dataclass(eq=False)
class ClusterProcess:
    """One process.

    Attributes:
        number: its rank.
        host: its machine.
        process: the process, or here the ssh that carries it.
        reading, writing: file descriptors of our end of its line.
        pid: its process id on its machine.
        heard: when it last sent something, or was started.
        spoke: whether it ever sent something.
        rest: the incomplete last line.
    """

    number: int
    host: Host
    process: subprocess.Popen[bytes]
    reading: int
    writing: int
    pid: int | None = None
    heard: float = field(default_factory=time.monotonic)
    spoke: bool = False
    rest: bytes = b""

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
        self._selector = selectors.DefaultSelector()
        self.all: list[ClusterProcess] = []
        with ExitStack() as undo:
            undo.callback(self.end)
            for host, settings in zip(hosts.machines, hosts.launches(), strict=True):
                if self.all:
                    rank = self._start_other(host, settings)
                else:
                    rank = self._start_first(host, settings, listening)
                self.all.append(rank)
                self._selector.register(rank.reading, selectors.EVENT_READ, rank)
            undo.pop_all()

    def _start_first(
        self, host: Host, settings: dict[str, Any], listening: socket.socket | None
    ) -> ClusterProcess:
        """Rank 0 keeps the terminal; its line is a socket."""
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno()] + ([] if listening is None else [listening.fileno()])
        settings = settings | {"line": inherited[0]}
        settings["listening"] = None if listening is None else inherited[1]
        with theirs:
            process = subprocess.Popen(
                self._command(settings), pass_fds=inherited, start_new_session=True
            )
        line = ours.detach()
        return ClusterProcess(settings["rank"], host, process, line, line, process.pid)

    def _start_other(self, host: Host, settings: dict[str, Any]) -> ClusterProcess:
        """The line of any other rank is its stdin and stdout."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            host.command(self._command(settings)), stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None
        reading, writing = process.stdout.fileno(), process.stdin.fileno()
        pid = process.pid if host.is_here else None
        return ClusterProcess(settings["rank"], host, process, reading, writing, pid)

    def _command(self, settings: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", MODULE, json.dumps(settings), *self._arguments]

    def receive(self, seconds: float) -> list[tuple[ClusterProcess, str, str]]:
        """Lines that ranks send within this time: rank, word and reason; no heartbeats."""
        lines = []
        for key, _ in self._selector.select(seconds):
            rank: ClusterProcess = key.data
            try:
                content = os.read(rank.reading, 2**16)
            except OSError:  # it ended without reading all that we sent
                content = b""
            if not content:
                self._selector.unregister(rank.reading)
                continue
            rank.heard, rank.spoke = time.monotonic(), True
            *complete, rank.rest = (rank.rest + content).split(b"\n")
            for line in complete:
                word, _, reason = line.decode(errors="replace").partition(" ")
                if word == "pid" and reason.strip().isdecimal():
                    rank.pid = int(reason)
                elif word != HEARTBEAT:
                    lines.append((rank, word, reason))
        return lines

    def send(self, rank: ClusterProcess, line: str) -> None:
        """Send a line to a rank, unless it has ended."""
        with suppress(OSError):
            os.write(rank.writing, f"{' '.join(line.split())}\n".encode())

    def wait(self, seconds: float, ranks: Sequence[ClusterProcess] = ()) -> None:
        """Wait until these ranks, or all, have ended, at most this long."""
        until = time.monotonic() + seconds
        for rank in ranks or self.all:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """End all processes: by SIGTERM, then by SIGKILL."""
        for rank in self.all:
            if rank.process.poll() is None:
                rank.process.terminate()
        self.wait(KILL_SECONDS)
        for rank in self.all:
            with suppress(ProcessLookupError):
                if rank.process.poll() is None:
                    os.killpg(rank.process.pid, signal.SIGKILL)  # with whatever it started
            if not rank.host.is_here and rank.pid is not None:
                _kill_there(rank.host, rank.pid)
        for rank in self.all:
            rank.process.wait()
            if rank.process.stdin is None or rank.process.stdout is None:
                os.close(rank.reading)
            else:
                rank.process.stdin.close()
                rank.process.stdout.close()
        self._selector.close()


def _kill_there(host: Host, pid: int) -> None:
    """Kill a stopped process over ssh; any other ends by itself when its line is cut."""
    ours = f"ps -o command= -p {pid} | grep -q {MODULE} && kill -9 {pid}"
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [*SSH, host.ssh, ours], check=False, capture_output=True, timeout=SSH_SECONDS
        )
