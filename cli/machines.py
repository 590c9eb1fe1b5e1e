"""`--hosts` and what belongs to it: one command on several machines."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer

import dflash_mlx
from dflash_mlx.cluster.supervisor_line import FAILED, LOST, SupervisorLine
from dflash_mlx.errors import ClusterError, DFlashError
from dflash_mlx.loading.registry import check_name

from . import options
from .options import MODEL, flag, group, option
from .output import error_line, note

MLX_RANK: Final = "MLX_RANK"
RANK_VARIABLES: Final = (MLX_RANK, "OMPI_COMM_WORLD_RANK")  # set by launchers of MLX
LOST_CODE: Final = 1
MEMBER: Final = "dflash_mlx.member"  # key of rank 0's member in a context


@group
class Machines:
    """The machines that share the model."""

    hosts: Path | None = option(None, MODEL, "FILE", "Share the model (mlx.launch's file).")
    stall_seconds: float = option(
        20.0, MODEL, "S", "Give up a machine silent for S seconds.", min=1
    )
    pipeline: bool = flag("--pipeline", MODEL, "Split the layers over them, not the heads.")


@dataclass
class RankProcess:
    """A process that a supervisor started.

    Attributes:
        line: to the supervisor.
        listening: the file descriptor of a server's socket.
    """

    line: SupervisorLine
    listening: int | None = None


class Member:
    """This process as one of several that share a model.

    Attributes:
        cluster: all of them.
        end: called first, in any thread, when the others are lost; None ends the process at once
            if it waits for them.
        interrupted: whether Ctrl-C was pressed while this rank followed.

    Raises `ClusterError` if the others cannot be reached.
    """

    def __init__(self, machines: Machines, context: typer.Context) -> None:
        from dflash_mlx.cluster.cluster import Cluster

        self.end: Callable[[DFlashError], Any] | None = None
        self.interrupted = False
        self._line, self._lost_once = None, threading.Lock()
        process = context.find_object(RankProcess)
        if process is not None:
            self._line = process.line
            process.line.lost = lambda problem: self._lost(DFlashError(problem), False)
        self.cluster = Cluster(
            machines.stall_seconds, self._lost, self._met, pipeline=machines.pipeline
        )
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
            error_line(str(error))
            sys.stderr.flush()
            os._exit(LOST_CODE)


def rank() -> int | None:
    """The number of this process among several; None if no launcher of MLX started it."""
    found = next(filter(None, map(os.environ.get, RANK_VARIABLES)), None)
    return None if found is None else int(found)


def runs_elsewhere(
    machines: Machines,
    names: options.Names,
    weights: options.Weights,
    context: typer.Context,
    listen: Callable[[], socket.socket] | None = None,
) -> bool:
    """Start the command on all machines, or take part as one of them; whether it is done then.

    Rank 0 meets the others here and goes on. They try to reach it for a few seconds only, so
    nothing slow may come before.

    Args:
        listen: makes a server's socket.
    """
    if machines.hosts is not None:
        check_name(names.model)
        _supervise(machines, listen)
    if rank() is None:
        return False
    process, member = context.find_object(RankProcess), None
    try:
        check_name(names.model)  # before the seconds that MLX takes to start
        dflash_mlx.use_fast_blas(stock=weights.stock_blas)
        member = Member(machines, context)
        if member.cluster.rank == 0:
            context.meta[MEMBER] = member
            context.call_on_close(member.cluster.close)
            return False
        settings = weights.settings | {"kernels": weights.kernels}
        member.cluster.follow(names.model, weights.target_bits, **settings)
    except DFlashError as error:
        if member is not None and member.interrupted:  # rank 0 was interrupted, too, and left
            raise KeyboardInterrupt from error
        if not rank():
            raise
        if process is None:
            raise ClusterError(f"rank {rank()} ({socket.gethostname()}): {error}") from error
        process.line.send(FAILED, str(error))  # the supervisor reports one for all
        raise typer.Exit(LOST_CODE) from error
    return True


def _supervise(machines: Machines, listen: Callable[[], socket.socket] | None) -> None:
    """Start the command on all machines, and exit as it does."""
    from dflash_mlx.cluster.hosts import read_hosts
    from dflash_mlx.cluster.supervisor import Supervisor

    assert machines.hosts is not None
    hosts = read_hosts(machines.hosts.expanduser())
    bound = None if listen is None else listen()
    raise typer.Exit(Supervisor(hosts, _arguments(), note, bound).run())


def _arguments() -> list[str]:
    """The arguments of this command without `--hosts`."""
    given, found = iter(sys.argv[1:]), []
    for argument in given:
        if argument == "--hosts":
            next(given)
        elif not argument.startswith("--hosts="):
            found.append(argument)
    return found


def cluster_member(context: typer.Context) -> Member | None:
    """Rank 0 of the machines that share the model; None where this machine is alone."""
    member: Member | None = context.meta.get(MEMBER)
    return None if member is None or member.cluster.size == 1 else member


def stdin_ends(context: typer.Context) -> bool:
    """Whether stdin comes to an end: mlx.launch never closes that of its ranks."""
    return MLX_RANK not in os.environ or context.find_object(RankProcess) is not None


def inherited_socket(context: typer.Context) -> socket.socket | None:
    """A server's socket, on which a supervisor listens when this process does not."""
    process = context.find_object(RankProcess)
    if process is None or process.listening is None:
        return None
    return socket.socket(fileno=process.listening)
