"""Starts the processes of a cluster, sees that they go on, and ends and starts them again.

A rank that ends, or has been silent for too long, takes the others with it: a forward needs all of
them. Rank 0 hears of it first, so that its clients get an error; then all are ended, by their pids.
A server is started again, and until it is there its clients are told so (`away`).
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..machine.signals import signals_to
from .away import Away
from .hosts import Hosts
from .post import FAILED as HAS_FAILED
from .post import LOADED, LOST, MET, READY
from .ranks import Rank, Ranks

LOOK_SECONDS = 0.25
SILENT_SECONDS = 20.0  # without a beat: a process that is stopped, a machine that is gone
START_SECONDS = 30.0  # until the first: ssh connects, and Python imports
GRACE_SECONDS = 3.0  # for rank 0 to tell its clients
AGREE_SECONDS = 1.0  # within which what is wrong with one rank shows on the others
MOST_STARTS = 3  # that come to nothing, one after the other
FAILED, INTERRUPTED = 1, 130


@dataclass
class End:
    """How the processes came to their end.

    Attributes:
        code: for the shell.
        problem: what was wrong with a rank; None where rank 0 ended by itself, and said why.
        served: whether it was ready before.
    """

    code: int
    problem: str | None = None
    served: bool = False


class Coming:
    """How far the ranks are in loading, which may take as long as it takes, and in meeting.

    Args:
        ranks: how many.
        limit: seconds in which they meet once all have loaded.
    """

    def __init__(self, ranks: int, limit: float) -> None:
        self._loading, self._limit = ranks, limit
        self._since: float | None = None
        self._met = False

    def hear(self, rank: Rank, word: str) -> None:
        """A rank says something."""
        self._loading -= word == LOADED
        self._met = self._met or word == MET
        if not self._loading and self._since is None:
            self._since = time.monotonic()

    @property
    def problem(self) -> str | None:
        """What is wrong."""
        if self._met or self._since is None or time.monotonic() - self._since < self._limit:
            return None
        return f"the machines have not come together for {self._limit:.0f} seconds"


class Supervisor:
    """Runs a command on all machines.

    Args:
        hosts: the machines.
        arguments: of `dflash-mlx`, on all of them.
        say: a line for people.
        listening: of a server, which is started again when it fails; None for other commands.
        silent: seconds without a beat after which a rank is given up.
        start: starts all of their processes.
    """

    def __init__(
        self,
        hosts: Hosts,
        arguments: Sequence[str],
        say: Callable[[str], None],
        listening: socket.socket | None = None,
        silent: float = SILENT_SECONDS,
        start: Callable[[Hosts, Sequence[str], socket.socket | None], Ranks] = Ranks,
    ) -> None:
        self._hosts, self._arguments, self._say = hosts, arguments, say
        self._listening, self._silent, self._start = listening, silent, start
        self._told_to_end = 0
        self._failed: dict[str, str] = {}  # ranks by name, and what they say is wrong

    def run(self) -> int:
        """Until the command has ended; its exit code."""
        away = None if self._listening is None else Away(self._listening)
        with ExitStack() as stack:
            stack.enter_context(signals_to(self._told))
            if away is not None:
                stack.callback(away.close)
            return self._until_it_ends(away)

    def _until_it_ends(self, away: Away | None) -> int:
        starts = 0
        while True:
            starts += 1
            end = self._once(away)
            if end.problem is None or self._told_to_end:
                return end.code
            starts = 0 if end.served else starts
            if self._listening is None or starts == MOST_STARTS:
                self._say(f"{end.problem}: the cluster has ended.")
                return FAILED
            self._say(f"{end.problem}: all are started again.")

    def _once(self, away: Away | None) -> End:
        """Start all, and see them to their end."""
        with ExitStack() as stack:
            if away is not None:
                away.answer()
            ranks = self._start(self._hosts, self._arguments, self._listening)
            stack.callback(ranks.end)
            return self._see(ranks, away)

    def _see(self, ranks: Ranks, away: Away | None) -> End:
        served, passed_on, coming = False, 0, Coming(len(ranks.all), self._silent)
        while True:
            for rank, word, more in ranks.hear(LOOK_SECONDS):
                coming.hear(rank, word)
                if word == READY:
                    served = True
                    if away is not None:
                        away.close()
                elif word == HAS_FAILED:
                    self._failed[rank.name] = more
                elif word == LOST:
                    return self._lost(ranks, more, served, away)
            if self._told_to_end > passed_on:
                passed_on = self._told_to_end
                end = signal.SIGINT if self._listening is None else signal.SIGTERM
                ranks.all[0].process.send_signal(end)
            code = ranks.all[0].process.poll()
            if code is not None and (code >= 0 or self._told_to_end):
                return self._ended(ranks, code, served)
            problem = self._problem(ranks) or coming.problem
            if problem is not None:
                return self._lost(ranks, problem, served, away)

    def _ended(self, ranks: Ranks, code: int, served: bool) -> End:
        """Rank 0 has ended: by itself, or because another one did."""
        _wait(ranks, AGREE_SECONDS)
        signalled = _signalled(ranks)
        if code > 0 and signalled and not self._told_to_end:
            return End(FAILED, _how(signalled[0]), served)
        return End(code if code >= 0 else INTERRUPTED, None, served)

    def _problem(self, ranks: Ranks) -> str | None:
        """What is wrong with a rank. Those that are told that it is over end with 0."""
        for rank in ranks.all:
            if rank.process.poll():
                return _how(rank)
            silent = time.monotonic() - rank.heard
            most = self._silent if rank.spoke else max(self._silent, START_SECONDS)
            if rank.process.poll() is None and silent > most:
                return f"{rank.name} has been silent for {silent:.0f} seconds"
        return None

    def _lost(self, ranks: Ranks, problem: str, served: bool, away: Away | None) -> End:
        """Rank 0 tells its clients, if it can; who comes later is told from here."""
        if self._listening is not None and served:
            ranks.tell(ranks.all[0], problem)
            _wait_for(ranks.all[0], GRACE_SECONDS)
        else:
            _wait(ranks, AGREE_SECONDS)
        if away is not None:
            away.answer()
        signalled = _signalled(ranks)
        if not served and not signalled and any(rank.process.poll() for rank in ranks.all[1:]):
            if not ranks.all[0].process.poll():  # else it has said the same
                for name, why in self._failed.items():
                    self._say(f"{name}: {why}")
            return End(FAILED)
        problem = _how(signalled[0]) if signalled else problem.rstrip(".")
        return End(FAILED, problem, served)

    def _told(self, number: int, frame: Any) -> None:
        """Ctrl-C and SIGTERM are rank 0's, which knows how to end; the second one ends all."""
        self._told_to_end += 1
        if self._told_to_end > 1:
            raise KeyboardInterrupt


def _signalled(ranks: Ranks) -> list[Rank]:
    """Those that were killed."""
    return [rank for rank in ranks.all if (rank.process.poll() or 0) < 0]


def _how(rank: Rank) -> str:
    """How a process ended."""
    code = rank.process.poll() or 0
    return f"{rank.name} ended by signal {-code}" if code < 0 else f"{rank.name} ended ({code})"


def _wait_for(rank: Rank, seconds: float) -> None:
    until = time.monotonic() + seconds
    while rank.process.poll() is None and time.monotonic() < until:
        time.sleep(LOOK_SECONDS / 5)


def _wait(ranks: Ranks, seconds: float) -> None:
    until = time.monotonic() + seconds
    for rank in ranks.all:
        _wait_for(rank, until - time.monotonic())
