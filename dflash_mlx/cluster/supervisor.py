"""Starts the processes of a cluster, watches them, and restarts a server that fails.

A forward needs all ranks, so a rank that ends ends the others. A rank that hangs is noticed by
rank 0 (`Leader`), a machine that is gone also by ssh. Rank 0 learns first, so that its clients get
an error. Then all processes are ended by their ids.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from ..machine.signals import signals_to
from .hosts import Hosts
from .member import FAILED, LOST, READY
from .ranks import ClusterProcess, ClusterProcesses

POLL_SECONDS = 0.25
GRACE_SECONDS = 3.0  # for rank 0 to answer its clients
SETTLE_SECONDS = 1.0  # in which a failure of one rank shows on the others
MAX_STARTS = 3  # in a row without a server that was ready
FAILED_CODE, INTERRUPTED_CODE = 1, 130


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
        self._hosts, self._arguments, self._report = hosts, arguments, report
        self._listening = listening
        self._signals = 0  # Ctrl-C and SIGTERM so far
        self._served = False  # whether the server was ready in the current run

    def run(self) -> int:
        """Run the command to its end. Returns its exit code."""
        starts = 0
        with signals_to(self._signalled):
            while True:
                self._served, starts = False, starts + 1
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
        """The exit code of one run, and what failed; None if a rank has said it, or nothing did."""
        first, forwarded = ranks.all[0].process, 0
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
                ranks.wait(SETTLE_SECONDS)
                killed = _killed(ranks)
                if code > 0 and killed and not self._signals:
                    return FAILED_CODE, killed[0].end
                return code if code >= 0 else INTERRUPTED_CODE, None
            # Ranks that rank 0 has stopped end with 0.
            if failed := [rank for rank in ranks.all if rank.process.poll()]:
                return self._fail(ranks, failed[0].end, failures)

    def _fail(
        self, ranks: ClusterProcesses, problem: str, failures: dict[str, str]
    ) -> tuple[int, str | None]:
        """Tell rank 0, so that it answers its clients, and find out what went wrong."""
        if self._listening is not None and self._served:
            ranks.send(ranks.all[0], problem)
            ranks.wait(GRACE_SECONDS, ranks.all[:1])
        else:
            ranks.wait(SETTLE_SECONDS)
            late = ranks.receive(0)
            failures |= {rank.name: reason for rank, word, reason in late if word == FAILED}
        killed = _killed(ranks)
        if not self._served and not killed and any(rank.process.poll() for rank in ranks.all[1:]):
            if not ranks.all[0].process.poll():  # otherwise rank 0 has printed the same
                for name, reason in failures.items():
                    self._report(f"{name}: {reason}")
            return FAILED_CODE, None
        return FAILED_CODE, killed[0].end if killed else problem.rstrip(".")

    def _signalled(self, number: int, frame: Any) -> None:
        """Pass the first signal on to rank 0; the second one ends all."""
        self._signals += 1
        if self._signals > 1:
            raise KeyboardInterrupt


def _killed(ranks: ClusterProcesses) -> list[ClusterProcess]:
    """The processes that a signal ended."""
    return [rank for rank in ranks.all if (rank.process.poll() or 0) < 0]
