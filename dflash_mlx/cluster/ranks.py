"""The processes of a cluster, on this machine and, through ssh, on others."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .hosts import Host, Hosts
from .post import BEAT

MODULE = "dflash_mlx.cli.rank"
KILL_SECONDS = 5.0  # after SIGTERM, which a native wait does not hear
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SSH_SECONDS = 15.0


@dataclass(eq=False)
class Rank:
    """A process.

    Attributes:
        number: its rank.
        host: where it is.
        process: here: itself, or the ssh that carries it.
        writing: the file descriptor of our end of its line.
        pid: of the process over there.
        heard: when it last said anything, or was started.
        spoke: whether it ever did.
        rest: what has been read of a line.
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
        """For people."""
        return f"rank {self.number} ({self.host.ssh})"


class Ranks:
    """All processes of a cluster, once.

    Args:
        hosts: where.
        arguments: of the command that all of them run.
        listening: a socket for rank 0.
    """

    def __init__(
        self, hosts: Hosts, arguments: Sequence[str], listening: socket.socket | None = None
    ) -> None:
        self._arguments = list(arguments)
        self._selector = selectors.DefaultSelector()
        self.all: list[Rank] = []
        with ExitStack() as undo:
            undo.callback(self.end)
            for host, told in zip(hosts.machines, hosts.launches(), strict=True):
                rank = (
                    self._first(host, told, listening) if not self.all else self._other(host, told)
                )
                self.all.append(rank)
                self._selector.register(rank.reading, selectors.EVENT_READ, rank)
            undo.pop_all()  # all of them were started

    def _first(self, host: Host, told: dict[str, Any], listening: socket.socket | None) -> Rank:
        """Rank 0, which has the terminal; its line is a socket of its own."""
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno()] + ([] if listening is None else [listening.fileno()])
        told = told | {"line": fds[0], "listening": None if listening is None else fds[1]}
        with theirs:
            process = subprocess.Popen(self._command(told), pass_fds=fds, start_new_session=True)
        line = ours.detach()
        return Rank(told["rank"], host, process, line, line, process.pid)

    def _other(self, host: Host, told: dict[str, Any]) -> Rank:
        """Any other, whose line is its input and output."""
        command = command_on(host, self._command(told))
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        pid = process.pid if host.is_here else None
        return Rank(
            told["rank"], host, process, process.stdout.fileno(), process.stdin.fileno(), pid
        )

    def _command(self, told: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", MODULE, json.dumps(told), *self._arguments]

    def hear(self, seconds: float) -> list[tuple[Rank, str, str]]:
        """What ranks have said within so long: who, a word, and more; beats are not among it."""
        said = []
        for key, _ in self._selector.select(seconds):
            rank: Rank = key.data
            try:
                content = os.read(rank.reading, 2**16)
            except OSError:  # it ended with something of ours unread
                content = b""
            if not content:
                self._selector.unregister(rank.reading)
                continue
            rank.heard, rank.spoke = time.monotonic(), True
            *lines, rank.rest = (rank.rest + content).split(b"\n")
            for line in lines:
                word, _, more = line.decode(errors="replace").partition(" ")
                if word == "pid" and more.strip().isdecimal():
                    rank.pid = int(more)
                elif word != BEAT:
                    said.append((rank, word, more))
        return said

    def tell(self, rank: Rank, line: str) -> None:
        """Say something to a rank, if it still listens."""
        try:
            os.write(rank.writing, f"{' '.join(line.split())}\n".encode())
        except OSError:
            pass  # it is gone, and will be found to be

    def end(self) -> None:
        """None of them is left, whatever they do."""
        for rank in self.all:
            if rank.process.poll() is None:
                rank.process.terminate()
        until = time.monotonic() + KILL_SECONDS
        for rank in self.all:
            try:
                rank.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(rank)
            if not rank.host.is_here and rank.pid is not None:
                _kill_there(rank.host, rank.pid)
        for rank in self.all:
            rank.process.wait()
            for fd in {rank.reading, rank.writing}:
                if rank.process.stdout is None:
                    os.close(fd)
            for pipe in filter(None, (rank.process.stdin, rank.process.stdout)):
                pipe.close()
        self._selector.close()


def command_on(host: Host, command: Sequence[str]) -> list[str]:
    """What runs a command on a machine, in the folder of this process where there is one."""
    if host.is_here:
        return list(command)
    place = f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {shlex.join(command)}"
    return [*SSH, host.ssh, place]


def _kill(rank: Rank) -> None:
    """It leads a session: whatever it started goes with it."""
    try:
        os.killpg(rank.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended


def _kill_there(host: Host, pid: int) -> None:
    """Of a machine that answers ssh; a rank whose line is cut ends itself, unless it is stopped."""
    try:
        ours = f"ps -o command= -p {pid} | grep -q {MODULE} && kill -9 {pid}"
        subprocess.run(
            [*SSH, host.ssh, ours], check=False, capture_output=True, timeout=SSH_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        pass
