"""`--hosts` and what comes with it: one command on several machines."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer

import dflash_mlx
from dflash_mlx.cluster.supervisor_line import FAILED, LOST, MET, SupervisorLine
from dflash_mlx.errors import ClusterError, DFlashError
from dflash_mlx.loading.registry import check_name

from . import options
from .options import bits_of, is_given
from .output import error_line, note

MLX_RANK: Final = "MLX_RANK"
RANK: Final = (MLX_RANK, "OMPI_COMM_WORLD_RANK")  # what launchers of MLX tell a process
LOST_CODE: Final = 1
ALONE: Final = (
    "MLX has joined no other machine: the backend that was asked for does not work on this one. "
    "'dflash-mlx doctor --hosts FILE' says which does."
)
MEMBER: Final = "dflash_mlx.member"  # under which a context keeps rank 0's


@dataclass(frozen=True)
class Machines:
    """Which machines share the model."""

    hosts: Annotated[
        Path | None,
        options.value(
            group=options.MODEL, metavar="FILE", help="Machines to share it: mlx.launch's file."
        ),
    ] = None
    stall_seconds: Annotated[
        float,
        options.value(
            group=options.MODEL, metavar="S", help="Then one that is silent is given up."
        ),
    ] = 20.0
    pipeline: Annotated[
        bool,
        options.flag("--pipeline", options.MODEL, "Split layers over them, and not their heads."),
    ] = False


@dataclass
class Place:
    """Of a process that a supervisor started.

    Attributes:
        line: to the supervisor.
        listening: the file descriptor of a server's socket.
    """

    line: SupervisorLine
    listening: int | None = None


class Member:
    """This process, as one of several that share a model.

    Attributes:
        cluster: it and the others.
        end: what is done when others are lost, in any thread, before anything else; None ends the
            process at once if it waits for them.
        interrupted: whether somebody pressed Ctrl-C while this rank followed.

    Raises `ClusterError` when the others cannot be reached, or MLX does not look for them.
    """

    def __init__(self, machines: Machines, context: typer.Context) -> None:
        from dflash_mlx.cluster.cluster import Cluster

        self.end: Callable[[DFlashError], Any] | None = None
        self.interrupted = False
        self._line, self._said = None, threading.Lock()
        found = context.find_object(Place)
        if found is not None:
            self._line = found.line
            found.line.lost = lambda problem: self._lost(DFlashError(problem), False)
        self.cluster = Cluster(
            machines.stall_seconds, self._lost, self.tell, pipeline=machines.pipeline
        )
        if self.cluster.size == 1 and (rank() or found is not None):
            raise ClusterError(ALONE)

    def tell(self, word: str, reason: str = "") -> None:
        """Tell the supervisor, if there is one."""
        if word == MET and self.cluster.rank:  # from now on rank 0 says when it is over
            signal.signal(signal.SIGINT, self._interrupt)
        if self._line is not None:
            self._line.send(word, reason)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True

    def _lost(self, error: DFlashError, stuck: bool) -> None:
        if not self._said.acquire(blocking=False):
            return
        if self.end is not None:
            self.end(error)
        self.tell(LOST, str(error))
        if self.end is None and stuck:
            error_line(str(error))
            sys.stderr.flush()
            os._exit(LOST_CODE)


def rank() -> int | None:
    """Which of several processes this is, if `mlx.launch` or a supervisor started it."""
    found = next(filter(None, map(os.environ.get, RANK)), None)
    return None if found is None else int(found)


def shared(
    machines: Machines,
    names: options.Names,
    weights: options.Weights,
    context: typer.Context,
    listening: Callable[[], socket.socket] | None = None,
) -> bool:
    """Whether others answer: those that `--hosts` names, or, from another rank, rank 0.

    Then this process has done its part, and the command is over. Rank 0 meets the others here:
    they try to reach it for a few seconds only, and what a command does first may take longer.

    Args:
        listening: makes a server's socket.
    """
    if not 0 < machines.stall_seconds < inf:
        raise typer.BadParameter("must be above 0 and finite", param_hint="--stall-seconds")
    if rank() is None and machines.hosts is None:
        given = {"--pipeline": machines.pipeline}
        given["--stall-seconds"] = is_given("stall_seconds", context)
        if useless := [option for option, is_there in given.items() if is_there]:
            raise typer.BadParameter("goes with --hosts", param_hint=useless[0])
    if rank() is not None and machines.hosts is not None:
        raise typer.BadParameter("goes without mlx.launch", param_hint="--hosts")
    if machines.hosts is not None:
        _supervise(machines, listening)
    if rank() is None:
        return False
    check_name(names.model)  # before the seconds that MLX takes to start
    dflash_mlx.use_fast_blas(stock=weights.stock_blas)
    place = context.find_object(Place)
    try:
        member = Member(machines, context)
        if member.cluster.rank == 0:
            context.meta[MEMBER] = member
            context.call_on_close(member.cluster.close)
            return False
        _follow(member, names, weights)
    except DFlashError as error:
        if not rank():
            raise
        if place is None:
            raise ClusterError(f"rank {rank()} ({socket.gethostname()}): {error}") from error
        place.line.send(FAILED, str(error))  # all may say the same
        raise typer.Exit(LOST_CODE) from error
    return True


def _follow(member: Member, names: options.Names, weights: options.Weights) -> None:
    """Do what rank 0 says, to its end."""
    settings = weights.settings | {"exact": weights.exact}
    try:
        member.cluster.follow(names.model, bits_of(weights.target_bits), **settings)
    except DFlashError as error:
        if member.interrupted:  # then rank 0 was, too, and has left
            raise KeyboardInterrupt from error
        raise


def _supervise(machines: Machines, listening: Callable[[], socket.socket] | None) -> None:
    """Start the command on all machines, and exit as it does."""
    from dflash_mlx.cluster.hosts import read_hosts
    from dflash_mlx.cluster.supervisor import Supervisor

    assert machines.hosts is not None
    hosts = read_hosts(machines.hosts.expanduser())
    bound = None if listening is None else listening()
    supervisor = Supervisor(hosts, _arguments(), note, bound, max(1.0, machines.stall_seconds))
    raise typer.Exit(supervisor.run())


def _arguments() -> list[str]:
    """Of this command, as it was given, without `--hosts`."""
    given, found = iter(sys.argv[1:]), []
    for argument in given:
        if argument == "--hosts":
            next(given)
        elif not argument.startswith("--hosts="):
            found.append(argument)
    return found


def joined(context: typer.Context) -> Member | None:
    """What rank 0 shares a model with; None where it is alone."""
    member: Member | None = context.meta.get(MEMBER)
    return None if member is None or member.cluster.size == 1 else member


def stdin_ends(context: typer.Context) -> bool:
    """Whether what is read from stdin comes to an end: mlx.launch never closes its ranks'."""
    return MLX_RANK not in os.environ or context.find_object(Place) is not None


def inherited(context: typer.Context) -> socket.socket | None:
    """A server's socket, from a supervisor that listens on it while this process does not."""
    found = context.find_object(Place)
    if found is None or found.listening is None:
        return None
    return socket.socket(fileno=found.listening)
