"""`--hosts` and what comes with it: one command on several machines."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import dflash_mlx
from dflash_mlx.cluster.post import FAILED, LOST, Post
from dflash_mlx.errors import DFlashError

from . import options
from .options import bits_of
from .screen import error_line, note

RANK: Final = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")  # what launchers of MLX tell a process
LOST_CODE: Final = 1


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
        post: its line to the supervisor.
        listening: the file descriptor of a server's socket.
    """

    post: Post
    listening: int | None = None


class Member:
    """This process, as one of several that share a model; rank 0.

    Attributes:
        cluster: it and the others.
        end: what is done when others are lost, in any thread, before anything else; None ends the
            process at once if it waits for them.
    """

    def __init__(self, machines: Machines, context: typer.Context) -> None:
        from dflash_mlx.cluster.cluster import Cluster

        self.end: Callable[[DFlashError], Any] | None = None
        self._post, self._said = None, threading.Lock()
        found = context.find_object(Place)
        if found is not None:
            self._post = found.post
            found.post.lost = lambda problem: self._lost(DFlashError(problem), False)
        self.cluster = Cluster(
            machines.stall_seconds, self._lost, self.tell, pipeline=machines.pipeline
        )

    def tell(self, word: str, more: str = "") -> None:
        """Tell the supervisor, if there is one."""
        if self._post is not None:
            self._post.tell(word, more)

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

    Then this process has done its part, and the command is over.

    Args:
        listening: makes a server's socket.
    """
    if not machines.stall_seconds > 0:
        raise typer.BadParameter("must be above 0", param_hint="--stall-seconds")
    if machines.pipeline and rank() is None and machines.hosts is None:
        raise typer.BadParameter("goes with --hosts", param_hint="--pipeline")
    if rank() is not None and machines.hosts is not None:
        raise typer.BadParameter("goes without mlx.launch", param_hint="--hosts")
    if machines.hosts is not None:
        _supervise(machines, listening)
    if not rank():
        return False
    dflash_mlx.use_fast_blas(stock=weights.stock_blas)
    settings = weights.settings | {"exact": weights.exact}
    try:
        cluster = Member(machines, context).cluster
        cluster.follow(names.model, bits_of(weights.target_bits), **settings)
    except DFlashError as error:
        found = context.find_object(Place)
        if found is None:
            raise
        found.post.tell(FAILED, str(error))  # all may say the same
        raise typer.Exit(LOST_CODE) from error
    return True


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


def join(machines: Machines, context: typer.Context) -> Member | None:
    """What rank 0 shares a model with; None where it is alone."""
    if rank() is None:
        return None
    member = Member(machines, context)
    if member.cluster.size == 1:
        return None
    context.call_on_close(member.cluster.close)
    return member


def inherited(context: typer.Context) -> socket.socket | None:
    """A server's socket, from a supervisor that listens on it while this process does not."""
    found = context.find_object(Place)
    if found is None or found.listening is None:
        return None
    return socket.socket(fileno=found.listening)
