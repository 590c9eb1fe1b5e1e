"""`dflash-mlx doctor --hosts`: can these machines share a model, and how fast is their link?

It starts ranks of this command on all machines. Each says what it has; together they measure the
link. Under a plain mlx.launch the ranks are there already.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash_mlx.cluster.hosts import Hosts, read_hosts
from dflash_mlx.cluster.ranks import ClusterProcesses
from dflash_mlx.cluster.supervisor_line import LOST
from dflash_mlx.drafter.config import read_json
from dflash_mlx.errors import ConfigError, DFlashError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.machine.facts import installed
from dflash_mlx.validation import brief, is_integer, text_config

from .doctor_checks import Check
from .machines import Machines, Member, RankProcess
from .output import counted, note, waiting
from .roofline import target_folder

if TYPE_CHECKING:
    from dflash_mlx.cluster.link_times import LinkTimes

FOUND, MEASURED = "found", "measured"  # messages: every rank's versions; rank 0's times; in JSON
MEASURE_SECONDS = 120.0  # for ranks to start, meet and measure
LOOK_SECONDS = 0.25
SUMS_PER_LAYER = 2  # mlx-lm's sharding sums after attention and after the MLP
SAME = ("dflash-mlx", "mlx", "mlx-lm")  # versions that all machines must have
SSH_FAILED = 255  # exit code
LINK_ADVICE = (
    "Can the machines ping each other's ips? Does a firewall let Python accept connections? RDMA "
    "(jaccl) needs macOS 26.2, Thunderbolt 5 and 'rdma_ctl enable' in recovery mode; \"backend\": "
    '"ring" in the file does without.'
)


@dataclass
class Answers:
    """What the ranks say.

    Attributes:
        versions: of Python and packages, and the "backends" of MLX, by rank.
        ended: how, by rank.
        lost: why a rank does not reach the others.
        times: of the link, once measured.
    """

    versions: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    times: LinkTimes | None = None


def check_hosts(path: Path, model: str, hub: Hub) -> tuple[list[Check], dict[str, Any] | None]:
    """Check all machines of a file, and measure their link.

    Returns:
        The checks, and the times of the link in seconds; None where nothing was measured.

    Raises `SettingsError` for a bad file, and the errors of `Hub.config`.
    """
    width, layers = _shape(model, hub)
    hosts = read_hosts(path.expanduser())
    with waiting("Measuring the link"):
        answers = _ask(hosts, model)
    found = answers.versions
    checks = [_machine(rank, host.ssh, answers) for rank, host in enumerate(hosts.machines)]
    if len(found) == len(checks):
        named = {host.ssh: found[rank] for rank, host in enumerate(hosts.machines)}
        checks += [*_versions(named), *_backend(hosts.backend, named)]
    if answers.times is not None:
        return [*checks, Check("link", "ok", _describe(answers.times, layers))], asdict(
            answers.times
        )
    if any(check.status == "fail" for check in checks):
        return [*checks, Check("link", "warn", "not measured", "Fix what failed above.")], None
    return [*checks, Check("link", "fail", answers.lost, LINK_ADVICE)], None


def measure(model: str, hub: Hub, context: typer.Context) -> None:
    """Measure the link as one of the ranks; rank 0 reports the times."""
    process = context.find_object(RankProcess)
    if process is not None:
        process.line.send(FOUND, json.dumps(_found()))
    try:
        width, layers = _shape(model, hub)
        member = Member(Machines(), context)
        from dflash_mlx.cluster.link_times import measure_link

        times = measure_link(member.cluster.channel.group, width)
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


def _found() -> dict[str, Any]:
    """What this machine has."""
    import mlx.core as mx

    backends = [name for name in ("ring", "jaccl", "mpi") if mx.distributed.is_available(name)]
    versions = {name: installed(name) for name in SAME}
    return {"Python": platform.python_version(), **versions, "backends": backends}


def _machine(rank: int, ssh: str, answers: Answers) -> Check:
    name, found = f"rank {rank}, {ssh}", answers.versions.get(rank)
    if found is not None:
        versions = ", ".join(f"{package} {found[package]}" for package in ("Python", *SAME))
        return Check(name, "ok", f"{versions}; backends: {', '.join(found['backends'])}")
    code = answers.ended.get(rank)
    if code is None:
        return Check(name, "fail", "has not answered in time", "Is it asleep?")
    if code == SSH_FAILED:
        advice = f"'ssh-copy-id {ssh}' once; then 'ssh {ssh} true' must ask for nothing."
        return Check(name, "fail", "ssh does not get there", advice)
    advice = f"Install dflash-mlx there in the same folder as here: {sys.executable}."
    return Check(name, "fail", f"dflash-mlx does not run there ({code})", advice)


def _versions(found: Mapping[str, dict[str, Any]]) -> Iterator[Check]:
    """Versions that differ between machines."""
    for package in (*SAME, "Python"):
        if len({one[package] for one in found.values()}) > 1:
            each = "; ".join(f"{one[package]} on {ssh}" for ssh, one in found.items())
            advice = f"Install the same {package} on all of them."
            yield Check(package, "fail" if package in SAME else "warn", each, advice)


def _backend(backend: str, found: Mapping[str, dict[str, Any]]) -> Iterator[Check]:
    """The file's backend, where a machine does not have it."""
    base = backend.partition("-")[0]
    if without := [ssh for ssh, one in found.items() if base not in one["backends"]]:
        yield Check(backend, "fail", f"not available on {', '.join(without)}", LINK_ADVICE)


def _ask(hosts: Hosts, model: str) -> Answers:
    """Start ranks of `doctor`, and stop them when they have measured or cannot."""
    from dflash_mlx.cluster.link_times import LinkTimes

    answers = Answers()
    ranks = ClusterProcesses(hosts, ["doctor", "--model", model])
    until = time.monotonic() + MEASURE_SECONDS
    try:
        while answers.times is None and time.monotonic() < until:
            for rank, word, more in ranks.receive(LOOK_SECONDS):
                if word == FOUND:
                    answers.versions[rank.number] = json.loads(more)
                elif word == MEASURED:
                    answers.times = LinkTimes(**json.loads(more))
                elif word == LOST:
                    answers.lost = answers.lost or more.rstrip(".")
            for rank in ranks.all:
                if code := rank.process.poll():
                    answers.ended[rank.number] = code
                    answers.lost = answers.lost or rank.end
            said = answers.versions.keys() | answers.ended.keys()
            if answers.lost and len(said) == len(ranks.all):
                break
    finally:
        ranks.end()
    answers.lost = answers.lost or f"the machines did not meet within {MEASURE_SECONDS:.0f} seconds"
    return answers


def _describe(times: LinkTimes, layers: int) -> str:
    """The link, and how long a step waits for it."""
    sums = SUMS_PER_LAYER * layers + 1  # and the message
    one, block = (1e3 * sums * each for each in (times.row, times.rows))
    return (
        f"{counted(times.machines, 'machine')}, {times.bandwidth / 1e9:.2g} GB/s; a sum of one row "
        f"takes {1e6 * times.row:,.0f} us, of 16 rows {1e6 * times.rows:,.0f} us; with {sums} sums "
        f"a plain step waits {one:,.2f} ms, a step of 16 rows {block:,.2f} ms"
    )
