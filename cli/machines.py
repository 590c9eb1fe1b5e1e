"""`--hosts` and what belongs to it: one command on several machines."""

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

CLUSTER: Final = "dflash_mlx.cluster"  # key of rank 0's cluster in a context


@dataclass(frozen=True)
class Machines:
    """The machines that share the model."""

    hosts: Path | None = option(None, MODEL, "FILE", "Share the model (mlx.launch's file).")
    stall_seconds: float = option(
        20.0, MODEL, "S", "Give up a machine silent for S seconds.", min=1
    )
    pipeline: bool = flag("--pipeline", MODEL, "Split the layers over them, not the heads.")


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
        local_path(names.model)  # raises for a wrong name
        _supervise(machines, listen)
    if rank() is None:
        return False
    process, cluster = context.find_object(RankProcess), None
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
        if cluster is not None and cluster.interrupted:  # rank 0 was interrupted, too, and left
            raise KeyboardInterrupt from error
        if not rank():
            raise
        if process is None:
            raise ClusterError(f"rank {rank()} ({socket.gethostname()}): {error}") from error
        process.send(FAILED, str(error))  # the supervisor reports one for all
        raise typer.Exit(LOST_CODE) from error
    return True


def _supervise(machines: Machines, listen: Callable[[], socket.socket] | None) -> None:
    """Start the command on all machines, and exit as it does."""
    from dflash_mlx.cluster.hosts import read_hosts
    from dflash_mlx.cluster.supervisor import Supervisor

    assert machines.hosts is not None
    hosts = read_hosts(user_path(machines.hosts))
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


def cluster_member(context: typer.Context) -> Cluster | None:
    """Rank 0 of the machines that share the model; None where this machine is alone."""
    cluster: Cluster | None = context.meta.get(CLUSTER)
    return None if cluster is None or cluster.size == 1 else cluster


def stdin_ends(context: typer.Context) -> bool:
    """Whether stdin comes to an end: mlx.launch never closes that of its ranks."""
    return MLX_RANK not in os.environ or context.find_object(RankProcess) is not None


def inherited_socket(context: typer.Context) -> socket.socket | None:
    """A server's socket, on which a supervisor listens when this process does not."""
    process = context.find_object(RankProcess)
    return None if process is None else process.inherited_socket()
