"""`--hosts` and its options: one command runs on several machines."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

import dflash_mlx
from dflash_mlx.cluster.member import FAILED, LOST_CODE, MLX_RANK, RankProcess, rank
from dflash_mlx.errors import ClusterError, DFlashError
from dflash_mlx.loading.registry import local_path
from dflash_mlx.validation import user_path

from . import options
from .options import MODEL, flag, option
from .output import note

if TYPE_CHECKING:
    from dflash_mlx.cluster.cluster import Cluster

CLUSTER: Final = "dflash_mlx.cluster"  # the key of rank 0's cluster in a Typer context


@dataclass(frozen=True)
class Machines:
    """The machines that share the model."""

    hosts: Path | None = option(
        None,
        panel=MODEL,
        metavar="FILE",
        help="Share the model with the machines in this hosts file.",
    )
    stall_seconds: float = option(
        20.0,
        panel=MODEL,
        metavar="S",
        help="Stop if a machine is silent for S seconds.",
        min=1,
    )
    pipeline: bool = flag(
        "--pipeline",
        panel=MODEL,
        help="Give each machine some layers, not some heads.",
    )


def runs_elsewhere(
    machines: Machines,
    names: options.Names,
    weights: options.Weights,
    context: typer.Context,
    listen: Callable[[], socket.socket] | None = None,
) -> bool:
    """Start the command on all machines, or follow rank 0 as one of them.

    Returns whether that was the whole command. On rank 0, and without several machines, it is not.
    The other ranks try to reach rank 0 for a few seconds only, so nothing slow may come first.

    Args:
        machines: the options.
        names: the model.
        weights: how weights are loaded.
        context: the context of the command.
        listen: makes a server's socket.
    """
    if machines.hosts is not None:
        local_path(names.model)  # raises for a wrong name
        _supervise(machines, listen)
    if rank() is None:
        return False
    process = context.find_object(RankProcess)
    cluster = None
    try:
        local_path(names.model)  # raises before the seconds that MLX takes to start
        dflash_mlx.use_fast_blas(stock=weights.stock_blas)
        from dflash_mlx.cluster.cluster import Cluster

        cluster = Cluster(machines.stall_seconds, machines.pipeline, process)
        if cluster.rank == 0:
            context.meta[CLUSTER] = cluster
            context.call_on_close(cluster.close)
            return False
        cluster.follow(names.model, weights.target_bits, **weights.settings)
    except DFlashError as error:
        if cluster is not None and cluster.interrupted:  # rank 0 was interrupted as well, and left
            raise KeyboardInterrupt from error
        if not rank():
            raise
        if process is None:
            raise ClusterError(f"rank {rank()} ({socket.gethostname()}): {error}") from error
        process.send(FAILED, str(error))  # the supervisor prints one error for all ranks
        raise typer.Exit(LOST_CODE) from error
    return True


def _supervise(machines: Machines, listen: Callable[[], socket.socket] | None) -> None:
    """Start the command on all machines, and exit with its code."""
    from dflash_mlx.cluster.hosts import read_hosts
    from dflash_mlx.cluster.supervisor import Supervisor

    assert machines.hosts is not None
    hosts = read_hosts(user_path(machines.hosts))
    listening = None if listen is None else listen()
    supervisor = Supervisor(
        hosts,
        _arguments_without_hosts(),
        report=note,
        listening=listening,
    )
    raise typer.Exit(supervisor.run())


def _arguments_without_hosts() -> list[str]:
    arguments = []
    remaining = iter(sys.argv[1:])
    for argument in remaining:
        if argument == "--hosts":
            next(remaining)
        elif not argument.startswith("--hosts="):
            arguments.append(argument)
    return arguments


def cluster_member(context: typer.Context) -> Cluster | None:
    """Return rank 0 of the machines that share the model; None if this machine is alone."""
    cluster: Cluster | None = context.meta.get(CLUSTER)
    return None if cluster is None or cluster.size == 1 else cluster


def stdin_ends(context: typer.Context) -> bool:
    """Whether stdin ever ends. mlx.launch does not close the stdin of its ranks."""
    return MLX_RANK not in os.environ or context.find_object(RankProcess) is not None


def inherited_socket(context: typer.Context) -> socket.socket | None:
    """Return the socket on which the supervisor listens for this server, if there is one."""
    process = context.find_object(RankProcess)
    return None if process is None else process.inherited_socket()
