"""Starts the processes of a cluster, watches them, and restarts a server that fails.

Processes run on this machine and, through ssh, on others. A forward needs all ranks, so a rank that
ends ends the others. A rank that hangs is noticed by rank 0 (`Leader`), a machine that is gone also
by ssh. Rank 0 learns first, so that its clients get an error. Then all processes are ended by their
ids.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from ..machine.signals import signals_to
from .hosts import Host, Hosts
from .member import FAILED, LOST, READY

MODULE = "dflash_mlx.cli.rank"
KILL_SECONDS = 5.0  # after SIGTERM, which a native wait does not hear
POLL_SECONDS = 0.25
GRACE_SECONDS = 3.0  # for rank 0 to answer its clients
SETTLE_SECONDS = 1.0  # in which a failure of one rank shows on the others
MAX_STARTS = 3  # in a row without a server that was ready
FAILED_CODE = 1
INTERRUPTED_CODE = 130


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
        """The rank and its machine, for messages."""
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
        """Start rank 0. It keeps the terminal, so we exchange lines with it over a socket."""
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno()]
        settings = settings | {"line": theirs.fileno(), "listening": None}
        if listening is not None:
            inherited.append(listening.fileno())
            settings["listening"] = listening.fileno()
        with ours, theirs:
            process = subprocess.Popen(
                self._command(settings), pass_fds=inherited, start_new_session=True
            )
            line = ours.makefile("rwb", buffering=0)
        return ClusterProcess(
            settings["rank"], host=host, process=process, reading=line, writing=line
        )

    def _start_other(self, host: Host, settings: dict[str, Any]) -> ClusterProcess:
        """Start another rank. We exchange lines with it over its stdin and stdout."""
        process = subprocess.Popen(
            host.command(self._command(settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        return ClusterProcess(
            settings["rank"],
            host=host,
            process=process,
            reading=process.stdout,
            writing=process.stdin,
        )

    def _command(self, settings: dict[str, Any]) -> list[str]:
        return [sys.executable, "-m", MODULE, json.dumps(settings), *self._arguments]

    def _read(self, rank: ClusterProcess) -> None:
        """Read a rank's lines until it ends."""
        with suppress(OSError):  # it ended without reading all that we sent
            for line in rank.reading:
                word, _, reason = line.decode(errors="replace").strip().partition(" ")
                self._lines.put((rank, word, reason))

    def receive(self, seconds: float) -> list[tuple[ClusterProcess, str, str]]:
        """The lines that ranks send within `seconds`, each as rank, word and reason."""
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
        """Wait for at most `seconds` until `ranks` have ended; until all have if none is named."""
        until = time.monotonic() + seconds
        for rank in ranks or self.all:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """End all processes: by SIGTERM, then by SIGKILL. Remote ones end when ssh closes stdin."""
        for rank in self.all:
            rank.process.terminate()
        self.wait(KILL_SECONDS)
        for rank in self.all:
            rank.process.kill()
            rank.process.wait()
            rank.writing.close()


class Supervisor:
    """Runs a command on all machines.

    Args:
        hosts: the machines.
        arguments: of `dflash-mlx`, on all of them.
        report: prints a line for the user.
        listening: of a server, which is restarted when it fails; None for other commands.
    """

    def __init__(
        self,
        hosts: Hosts,
        arguments: Sequence[str],
        report: Callable[[str], None],
        listening: socket.socket | None = None,
    ) -> None:
        self._hosts = hosts
        self._arguments = arguments
        self._report = report
        self._listening = listening
        self._signals = 0  # Ctrl-C and SIGTERM so far
        self._served = False  # whether the server was ready in the current run

    def run(self) -> int:
        """Run the command to its end. Returns its exit code."""
        starts = 0
        with signals_to(self._signalled):
            while True:
                self._served = False
                starts += 1
                ranks = ClusterProcesses(self._hosts, self._arguments, self._listening)
                try:
                    code, problem = self._watch(ranks)
                finally:
                    ranks.end()
                if problem is None or self._signals:
                    return code
                starts = 0 if self._served else starts
                if self._listening is None or starts == MAX_STARTS:
                    self._report(f"{problem}: the cluster has ended.")
                    return FAILED_CODE
                self._report(f"{problem}: all are started again.")

    def _watch(self, ranks: ClusterProcesses) -> tuple[int, str | None]:
        """Watch one run until it ends.

        Returns its exit code and what failed, which is None if nothing did or a rank has said it.
        """
        first = ranks.all[0].process
        forwarded = 0
        failures: dict[str, str] = {}
        while True:
            for rank, word, reason in ranks.receive(POLL_SECONDS):
                if word == READY:
                    self._served = True
                elif word == FAILED:
                    failures[rank.name] = reason
                elif word == LOST:
                    return self._fail(ranks, reason, failures)
            if self._signals > forwarded:  # rank 0 knows how to end
                forwarded = self._signals
                first.send_signal(signal.SIGTERM if self._listening else signal.SIGINT)
            code = first.poll()
            if code is not None and (code >= 0 or self._signals):
                return self._after_rank_0(ranks, code)
            # Ranks that rank 0 has stopped end with 0.
            failed = [rank for rank in ranks.all if rank.process.poll()]
            if failed:
                return self._fail(ranks, failed[0].end, failures)

    def _after_rank_0(self, ranks: ClusterProcesses, code: int) -> tuple[int, str | None]:
        """What `_watch` returns once rank 0 has ended with `code`, by itself or by our signal."""
        ranks.wait(SETTLE_SECONDS)
        if self._signals:
            return code if code >= 0 else INTERRUPTED_CODE, None
        killed = _killed(ranks)
        if code > 0 and killed:
            return FAILED_CODE, killed[0].end
        return code, None

    def _fail(
        self, ranks: ClusterProcesses, problem: str, failures: dict[str, str]
    ) -> tuple[int, str | None]:
        """Tell rank 0 of a problem, so that it answers its clients. Returns what `_watch` does.

        Args:
            ranks: the processes.
            problem: what is known so far.
            failures: the reasons that ranks have sent, by their names.
        """
        if self._listening is not None and self._served:
            ranks.send(ranks.all[0], problem)
            ranks.wait(GRACE_SECONDS, ranks.all[:1])
        else:
            ranks.wait(SETTLE_SECONDS)
            late = ranks.receive(0)
            failures |= {rank.name: reason for rank, word, reason in late if word == FAILED}
        killed = _killed(ranks)
        if killed:
            return FAILED_CODE, killed[0].end
        other_failed = any(rank.process.poll() for rank in ranks.all[1:])
        if self._served or not other_failed:
            return FAILED_CODE, problem.rstrip(".")
        if not ranks.all[0].process.poll():  # otherwise rank 0 has printed the same
            for name, reason in failures.items():
                self._report(f"{name}: {reason}")
        return FAILED_CODE, None

    def _signalled(self, number: int, frame: Any) -> None:
        """Count a signal. `_watch` passes the first on to rank 0; the second ends all processes."""
        self._signals += 1
        if self._signals > 1:
            raise KeyboardInterrupt


def _killed(ranks: ClusterProcesses) -> list[ClusterProcess]:
    """The processes that a signal ended."""
    return [rank for rank in ranks.all if (rank.process.poll() or 0) < 0]
