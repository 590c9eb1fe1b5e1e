"""`dflash-mlx doctor --hosts`: can these machines share a model, and how fast is their link?

It starts ranks of this command on all machines. Each says what it has; together they measure the
link. Under a plain mlx.launch the ranks are there already.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import dflash_mlx
from dflash_mlx.cluster.hosts import Hosts, read_hosts
from dflash_mlx.cluster.ranks import ClusterProcesses
from dflash_mlx.cluster.supervisor_line import LOST
from dflash_mlx.errors import ConfigError, DFlashError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.machine.facts import installed
from dflash_mlx.validation import brief, is_integer, text_config

from .machines import Machines, Member, RankProcess
from .output import counted, note, waiting
from .roofline import find_config

if TYPE_CHECKING:
    from dflash_mlx.cluster.link_times import LinkTimes

FOUND, MEASURED = "found", "measured"  # messages: every rank's versions; rank 0's times; in JSON
MEASURE_SECONDS = 120.0  # for ranks to start, meet and measure
LOOK_SECONDS = 0.25
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
    for package in SAME:
        versions = {one[package] for one in found.values()}
        if len(versions) > 1:
            advice = f"Install the same {package} on all machines."
            checks.append(Check(package, "fail", " and ".join(sorted(versions)), advice))
    if answers.times is None:
        return [*checks, Check("link", "fail", answers.lost, LINK_ADVICE)], None
    link = Check("link", "ok", _describe(answers.times, layers))
    return [*checks, link], asdict(answers.times)


def measure(model: str, hub: Hub, context: typer.Context) -> None:
    """Measure the link as one of the ranks; rank 0 reports the times."""
    process = context.find_object(RankProcess)
    if process is not None:
        import mlx.core as mx

        backends = [name for name in ("ring", "jaccl", "mpi") if mx.distributed.is_available(name)]
        versions = {"Python": platform.python_version(), SAME[0]: dflash_mlx.__version__}
        versions |= {name: installed(name) or "unknown" for name in SAME[1:]}
        process.line.send(FOUND, json.dumps(versions | {"backends": backends}))
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
    config, file = find_config(model, hub)
    config = text_config(config)
    found: list[Any] = [config.get(name) for name in ("hidden_size", "num_hidden_layers")]
    if not all(map(is_integer, found)):
        raise ConfigError(f"{file}: hidden_size must be 1 or more, not {brief(found[0])}.")
    return found[0], found[1]


def _machine(rank: int, ssh: str, answers: Answers) -> Check:
    name, found = f"rank {rank}, {ssh}", answers.versions.get(rank)
    if found is not None:
        versions = ", ".join(f"{package} {found[package]}" for package in ("Python", *SAME))
        return Check(name, "ok", f"{versions}; backends: {', '.join(found['backends'])}")
    code = answers.ended.get(rank)
    detail = "has not answered in time" if code is None else f"dflash-mlx does not run ({code})"
    advice = f"'ssh {ssh} {sys.executable} -m dflash_mlx doctor' must work without a password."
    return Check(name, "fail", detail, advice)


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
    plain, drafted = (1e3 * sums * each for each in (times.row, times.rows))
    return (
        f"{counted(times.machines, 'machine')}, {times.bandwidth / 1e9:.2g} GB/s; a plain step "
        f"waits {plain:,.2f} ms, a step of 16 rows {drafted:,.2f} ms"
    )
