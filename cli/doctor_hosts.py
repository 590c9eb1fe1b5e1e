"""`dflash-mlx doctor --hosts`: can these machines share a model, and how fast is their link?

It asks every machine what it has, and then starts ranks of this command there, which measure the
link. Under a plain mlx.launch the ranks are there already.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash_mlx.cluster.hosts import Hosts, read_hosts
from dflash_mlx.cluster.probe import HostReport, probe
from dflash_mlx.cluster.ranks import ClusterProcesses
from dflash_mlx.cluster.supervisor_line import LOST
from dflash_mlx.drafter.config import read_json
from dflash_mlx.errors import ConfigError, DFlashError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.validation import brief, is_integer, text_config

from .doctor_checks import Check
from .machines import Machines, Member, RankProcess
from .output import counted, note, waiting
from .roofline import target_folder

if TYPE_CHECKING:
    from dflash_mlx.cluster.link_times import LinkTimes

MEASURED = "measured"  # message of rank 0, with the times in JSON
MEASURE_SECONDS = 120.0  # for ranks to start, meet and measure
LOOK_SECONDS = 0.25
SUMS_PER_LAYER = 2  # mlx-lm's sharding sums after attention and after the MLP
SAME = ("dflash-mlx", "mlx", "mlx-lm")  # versions that all machines must have
LINK_ADVICE = (
    "Can the machines ping each other's ips? Does a firewall let Python accept connections? RDMA "
    "(jaccl) needs macOS 26.2, Thunderbolt 5 and 'rdma_ctl enable' in recovery mode; \"backend\": "
    '"ring" in the file does without.'
)


def check_hosts(path: Path, model: str, hub: Hub) -> tuple[list[Check], dict[str, Any] | None]:
    """Check all machines of a file, and measure their link.

    Returns:
        The checks, and the times of the link in seconds; None where nothing was measured.

    Raises `SettingsError` for a bad file, and the errors of `Hub.config`.
    """
    width, layers = _shape(model, hub)
    hosts = read_hosts(path.expanduser())
    with waiting("Asking all machines"):
        reports = probe(hosts.machines)
    checks = [_machine(number, one) for number, one in enumerate(reports)]
    if all(check.status == "ok" for check in checks):
        checks += [*_versions(reports), *_backend(hosts.backend, reports)]
    if any(check.status == "fail" for check in checks):
        return [*checks, Check("link", "warn", "not measured", "Fix what failed above.")], None
    with waiting("Measuring the link"):
        times, problem = _run_ranks(hosts, model)
    if times is None:
        return [*checks, Check("link", "fail", problem, LINK_ADVICE)], None
    return [*checks, Check("link", "ok", _describe(times, layers))], asdict(times)


def measure(model: str, hub: Hub, context: typer.Context) -> None:
    """Measure the link as one of the ranks; rank 0 reports the times."""
    width, layers = _shape(model, hub)
    process = context.find_object(RankProcess)
    try:
        member = Member(Machines(), context)
        import mlx.core as mx

        from dflash_mlx.cluster.channel import Channel
        from dflash_mlx.cluster.link_times import measure_link

        times = measure_link(Channel(mx.distributed.init()), width)
    except DFlashError as error:
        if process is None:
            raise
        process.line.send(LOST, str(error))
        raise typer.Exit(1) from error
    if member.cluster.rank:
        return
    if process is None:
        note(_describe(times, layers))
    else:
        process.line.send(MEASURED, json.dumps(asdict(times)))


def _shape(model: str, hub: Hub) -> tuple[int, int]:
    """A model's hidden size and number of layers. Raises `ConfigError`."""
    file = target_folder(model, hub) / "config.json"
    config = text_config(read_json(file))
    found: list[Any] = [config.get(name) for name in ("hidden_size", "num_hidden_layers")]
    if not all(map(is_integer, found)):
        raise ConfigError(f"{file}: hidden_size must be 1 or more, not {brief(found[0])}.")
    return found[0], found[1]


def _machine(number: int, one: HostReport) -> Check:
    name = f"rank {number}, {one.host.ssh}"
    if one.problem:
        return Check(name, "fail", one.problem, one.advice)
    missing = [package for package in SAME if one.versions.get(package) is None]
    if missing:
        advice = "Install there what is installed here."
        return Check(name, "fail", f"{', '.join(missing)} not installed", advice)
    versions = ", ".join(f"{package} {version}" for package, version in one.versions.items())
    return Check(name, "ok", f"{versions}; backends: {', '.join(one.backends)}")


def _versions(reports: Sequence[HostReport]) -> Iterator[Check]:
    """Versions that differ between machines."""
    for package in (*SAME, "Python"):
        found = Counter(one.versions[package] for one in reports)
        if len(found) > 1:
            each = "; ".join(f"{one.versions[package]} on {one.host.ssh}" for one in reports)
            advice = f"Install the same {package} on all of them."
            yield Check(package, "fail" if package in SAME else "warn", each, advice)


def _backend(backend: str, reports: Sequence[HostReport]) -> Iterator[Check]:
    """The file's backend, where a machine does not have it."""
    base = backend.partition("-")[0]
    if without := [one.host.ssh for one in reports if base not in one.backends]:
        yield Check(backend, "fail", f"not available on {', '.join(without)}", LINK_ADVICE)


def _run_ranks(hosts: Hosts, model: str) -> tuple[LinkTimes | None, str]:
    """Start ranks of `doctor` and stop them again: the measured times, or what went wrong."""
    from dflash_mlx.cluster.link_times import LinkTimes

    ranks = ClusterProcesses(hosts, ["doctor", "--model", model])
    until = time.monotonic() + MEASURE_SECONDS
    try:
        while time.monotonic() < until:
            for _, word, more in ranks.receive(LOOK_SECONDS):
                if word == MEASURED:
                    return LinkTimes(**json.loads(more)), ""
                if word == LOST:
                    return None, more.rstrip(".")
            for rank in ranks.all:
                if rank.process.poll():
                    return None, f"{rank.name} ended ({rank.process.poll()})"
    finally:
        ranks.end()
    return None, f"the machines did not meet within {MEASURE_SECONDS:.0f} seconds"


def _describe(times: LinkTimes, layers: int) -> str:
    """The link, and how long a step waits for it."""
    sums = SUMS_PER_LAYER * layers
    one, block = (1e3 * (sums * each + times.message) for each in (times.row, times.rows))
    return (
        f"{counted(times.machines, 'machine')}, {times.bandwidth / 1e9:.2g} GB/s; a sum of one row "
        f"takes {1e6 * times.row:,.0f} us, of 16 rows {1e6 * times.rows:,.0f} us; with {sums} sums "
        f"a plain step waits {one:,.2f} ms, a step of 16 rows {block:,.2f} ms"
    )
