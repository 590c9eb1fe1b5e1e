"""`dflash-mlx doctor --hosts`: can these machines share a model, and how fast is their link?

It starts ranks of that command on all machines. Each says what it has; together they measure sums
over the link. Under a plain mlx.launch the ranks are there already.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from ..errors import ClusterError
from ..machine.facts import DISTRIBUTION, installed
from ..validation import ErrorWrapper
from .hosts import Hosts
from .member import LOST, RankProcess
from .supervisor import ClusterProcesses

# Messages of the ranks, with JSON.
FOUND = "found"  # a rank's versions
MEASURED = "measured"  # the times of rank 0
MEASURE_SECONDS = 120.0  # for ranks to start, meet and measure
LOOK_SECONDS = 0.25
ROWS = 16  # of a drafted step
LARGE_BYTES = 2**23
SUMS = 8  # of one series, each of which needs the one before, as in a forward
SERIES = 3  # that are timed
SUMS_PER_LAYER = 2  # mlx-lm's sharding sums after attention and after the MLP
SAME = ("dflash-mlx", "mlx", "mlx-lm")  # versions that all machines must have
LINK_ADVICE = 'Check ips, firewall and backend: "ring" works where RDMA (jaccl) does not.'


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class LinkTimes:
    """Measured seconds.

    Attributes:
        machines: how many took part.
        width: half-precision numbers of a row, such as a model's hidden size.
        row, rows: for a sum of one row, and of 16.
        bandwidth: bytes per second, in a sum of 8 MiB.
    """

    machines: int
    width: int
    row: float
    rows: float
    bandwidth: float


def check_hosts(
    hosts: Hosts, model: str, shape: tuple[int, int]
) -> tuple[list[Check], dict[str, Any] | None]:
    """Check all machines, and measure their link.

    Args:
        hosts: the machines.
        model: the one that they would share.
        shape: its hidden size, and its number of layers.

    Returns:
        The checks, and the times of the link in seconds; None where nothing was measured.
    """
    versions = dict[int, dict[str, Any]]()
    ended: dict[int, int] = {}
    lost = ""
    times = None
    ranks = ClusterProcesses(hosts, ["doctor", "--model", model])
    until = time.monotonic() + MEASURE_SECONDS
    try:
        while times is None and time.monotonic() < until:
            for rank, word, more in ranks.receive(LOOK_SECONDS):
                if word == FOUND:
                    versions[rank.number] = json.loads(more)
                elif word == MEASURED:
                    times = LinkTimes(**json.loads(more))
                elif word == LOST:
                    lost = lost or more.rstrip(".")
            for rank in ranks.all:
                code = rank.process.poll()
                if code:
                    ended[rank.number] = code
                    lost = lost or rank.end
            if lost and len(versions.keys() | ended.keys()) == len(ranks.all):
                break
    finally:
        ranks.end()
    checks = [
        _machine(
            f"rank {rank}, {host.ssh}",
            ssh=host.ssh,
            versions=versions.get(rank),
            code=ended.get(rank),
        )
        for rank, host in enumerate(hosts.machines)
    ]
    for package in SAME:
        installed = {packages[package] for packages in versions.values()}
        if len(installed) > 1:
            advice = f"Install the same {package} on all machines."
            checks.append(
                Check(package, status="fail", detail=" and ".join(sorted(installed)), advice=advice)
            )
    if times is None:
        lost = lost or f"the machines did not meet within {MEASURE_SECONDS:.0f} seconds"
        return [*checks, Check("link", status="fail", detail=lost, advice=LINK_ADVICE)], None
    return [*checks, Check("link", "ok", describe(times, shape))], asdict(times)


def _machine(name: str, ssh: str, versions: dict[str, Any] | None, code: int | None) -> Check:
    """The check of a machine: its versions, or why it did not report them."""
    if versions is not None:
        shown = ", ".join(f"{package} {versions[package]}" for package in ("Python", *SAME))
        return Check(name, "ok", f"{shown}; backends: {', '.join(versions['backends'])}")
    detail = "has not answered in time" if code is None else f"dflash-mlx does not run ({code})"
    advice = f"'ssh {ssh} {sys.executable} -m dflash_mlx doctor' must work without a password."
    return Check(name, status="fail", detail=detail, advice=advice)


def take_part(process: RankProcess | None, shape: tuple[int, int]) -> str | None:
    """Measure the link as one of the ranks. Returns a line for rank 0's user, if it has one.

    Args:
        process: how `check_hosts` started it; None under another launcher.
        shape: as for `check_hosts`.

    Raises `ClusterError` when another rank is lost.
    """
    import mlx.core as mx

    from .cluster import Cluster

    backends = [name for name in ("ring", "jaccl", "mpi") if mx.distributed.is_available(name)]
    packages = zip(SAME, (DISTRIBUTION, *SAME[1:]), strict=True)
    versions = {name: installed(package) or "unknown" for name, package in packages}
    versions["Python"] = platform.python_version()
    if process is not None:
        process.send(FOUND, json.dumps(versions | {"backends": backends}))
    cluster = Cluster(process=process)
    times = measure_link(cluster.channel.group, shape[0])
    if cluster.rank:
        return None
    if process is None:
        return describe(times, shape)
    process.send(MEASURED, json.dumps(asdict(times)))
    return None


def measure_link(group: Any, width: int) -> LinkTimes:
    """Time sums together with all other ranks; returns this rank's times.

    Args:
        group: MLX's, of all ranks.
        width: as in `LinkTimes`.

    Raises `ClusterError` when another rank is lost.
    """
    import mlx.core as mx

    def seconds(x: mx.array) -> float:
        """The seconds of one sum: the median of `SERIES` series, without a first one to warm up.

        Each sum is halved first, so that the device computes between two sums as in a forward.
        """
        times = []
        for _ in range(SERIES + 1):
            start = time.perf_counter()
            total = x
            for _ in range(SUMS):
                total = mx.distributed.all_sum(total * 0.5, group=group)
            mx.eval(total)
            times.append((time.perf_counter() - start) / SUMS)
        return median(times[1:])

    with ErrorWrapper(ClusterError, "The machines cannot compute a sum together", (RuntimeError,)):
        row = seconds(mx.zeros((1, width), mx.bfloat16))
        rows = seconds(mx.zeros((ROWS, width), mx.bfloat16))
        large = seconds(mx.zeros((LARGE_BYTES // 4,), mx.float32))
    return LinkTimes(group.size(), width=width, row=row, rows=rows, bandwidth=LARGE_BYTES / large)


def describe(times: LinkTimes, shape: tuple[int, int]) -> str:
    """The link, and how long a step of a model of this shape waits for it."""
    sums = SUMS_PER_LAYER * shape[1] + 1  # one is the message
    plain = 1e3 * sums * times.row
    drafted = 1e3 * sums * times.rows
    return (
        f"{times.machines} machines, {times.bandwidth / 1e9:.2g} GB/s; a plain step "
        f"waits {plain:,.2f} ms, a step of {ROWS} rows {drafted:,.2f} ms"
    )
