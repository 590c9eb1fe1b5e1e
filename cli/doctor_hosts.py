"""`dflash-mlx doctor --hosts`: can these machines share a model, and what will a round wait for?

Started by a person it asks every machine what it has, and then starts ranks of itself there, which
measure their link and tell it. Under a plain mlx.launch the ranks are there already.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dflash_mlx.cluster.hosts import RING, Hosts, read_hosts
from dflash_mlx.cluster.post import LOST
from dflash_mlx.cluster.ranks import Ranks
from dflash_mlx.cluster.reach import Reached, reach
from dflash_mlx.drafter.config import read_json
from dflash_mlx.errors import ConfigError, DFlashError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.validation import brief, is_integer, text_config

from .doctor_checks import Check
from .machines import Machines, Member, Place
from .output import counted, waiting
from .roofline import published_acceptance, target_folder

if TYPE_CHECKING:
    from dflash_mlx.cluster.link_times import LinkTimes

MEASURED = "measured"  # what rank 0 tells, with the times in JSON
MEASURE_SECONDS = 120.0  # in which ranks start, meet and measure
LOOK_SECONDS = 0.25
SUMS_PER_LAYER = 2  # mlx-lm's sharding sums after attention and after the MLP
SAME = ("dflash-mlx", "mlx", "mlx-lm")  # versions that all machines must have
JACCL_ADVICE = (
    "RDMA needs macOS 26.2, Thunderbolt 5 and 'rdma_ctl enable' in recovery mode; "
    'or say "backend": "ring" in the file.'
)


@dataclass(frozen=True)
class Looked:
    """What was found.

    Attributes:
        checks: for people.
        measured: times of the link in seconds, and a round's; None where nothing was measured.
    """

    checks: list[Check]
    measured: dict[str, Any] | None


def look(path: Path | None, model: str, hub: Hub, context: typer.Context) -> Looked | None:
    """At all machines of a file; or, as a rank, at the link. None where another process reports.

    Raises `SettingsError` for a file that is none, `ConfigError` for a model's without a width, and
    the errors of `Hub.config`.
    """
    file = target_folder(model, hub) / "config.json"
    config = read_json(file)
    width: Any = text_config(config).get("hidden_size")
    if not is_integer(width):
        raise ConfigError(f"{file}: hidden_size must be 1 or more, not {brief(width)}.")
    if path is None:
        times = _measure(width, context)
        return None if times is None else _report([], times, model, config, None)
    hosts = read_hosts(path.expanduser())
    with waiting("Asking all machines"):
        reached = reach(hosts.machines)
    checks = [_machine(number, one) for number, one in enumerate(reached)]
    if all(check.status == "ok" for check in checks):
        checks += _versions(reached)
    if any(check.status == "fail" for check in checks):
        return Looked([*checks, _not_measured()], None)
    with waiting("Measuring the link"):
        found, backend, problems = _over_backends(hosts, reached, model)
    checks += problems
    if found is None:
        return Looked(checks, None)
    return _report(checks, found, model, config, backend)


def _machine(number: int, one: Reached) -> Check:
    name = f"rank {number}, {one.host.ssh}"
    if one.problem:
        return Check(name, "fail", one.problem, one.advice)
    missing = [package for package in SAME if one.versions.get(package) is None]
    if missing:
        advice = "Install there what is installed here."
        return Check(name, "fail", f"{', '.join(missing)} not installed", advice)
    versions = ", ".join(f"{package} {version}" for package, version in one.versions.items())
    return Check(name, "ok", f"{versions}; backends: {', '.join(one.backends)}")


def _versions(reached: Sequence[Reached]) -> Iterator[Check]:
    """What differs from the first machine, by name."""
    for package in (*SAME, "Python"):
        found = Counter(one.versions[package] for one in reached)
        if len(found) == 1:
            continue
        each = "; ".join(f"{one.versions[package]} on {one.host.ssh}" for one in reached)
        advice = f"Install the same {package} on all of them."
        yield Check(package, "fail" if package in SAME else "warn", each, advice)


def _not_measured() -> Check:
    return Check("link", "warn", "not measured", "Mend what failed above, and ask again.")


def _over_backends(
    hosts: Hosts, reached: Sequence[Reached], model: str
) -> tuple[LinkTimes | None, str, list[Check]]:
    """The times over the file's backend, or over the ring where that one does not work."""
    problems: list[Check] = []
    for backend in dict.fromkeys((hosts.backend, RING)):
        base = backend.partition("-")[0]
        without = [one.host.ssh for one in reached if base not in one.backends]
        if without:
            problem = f"not there on {', '.join(without)}"
        else:
            found, problem = _started(replace(hosts, backend=backend), model)
            if found is not None:
                return found, backend, problems
        advice = "Can they ping each other's ips? Does a firewall let Python accept connections?"
        problems.append(
            Check(backend, "fail", problem, advice if backend == RING else JACCL_ADVICE)
        )
    return None, "", problems


def _started(hosts: Hosts, model: str) -> tuple[LinkTimes | None, str]:
    """What the ranks of `doctor` have measured, or what is wrong; none of them is left."""
    from dflash_mlx.cluster.link_times import LinkTimes

    ranks, until = Ranks(hosts, ["doctor", "--model", model]), time.monotonic() + MEASURE_SECONDS
    try:
        while time.monotonic() < until:
            for _, word, more in ranks.hear(LOOK_SECONDS):
                if word == MEASURED:
                    return LinkTimes(**json.loads(more)), ""
                if word == LOST:
                    return None, more.rstrip(".")
            for rank in ranks.all:
                if rank.process.poll():
                    return None, f"{rank.name} ended ({rank.process.poll()})"
    finally:
        ranks.end()
    return None, f"the machines have not come together for {MEASURE_SECONDS:.0f} seconds"


def _measure(width: int, context: typer.Context) -> LinkTimes | None:
    """As a rank. The times for the rank that reports them: 0 of a plain mlx.launch."""
    place = context.find_object(Place)
    try:
        member = Member(Machines(), context)
        import mlx.core as mx

        from dflash_mlx.cluster.link_times import measure_link
        from dflash_mlx.cluster.wire import Wire

        times = measure_link(Wire(mx.distributed.init()), width)
    except DFlashError as error:
        if place is None:
            raise
        place.post.tell(LOST, str(error))
        raise typer.Exit(1) from error
    if member.cluster.rank:
        return None
    if place is None:
        return times
    place.post.tell(MEASURED, json.dumps(asdict(times)))
    return None


def _report(
    checks: list[Check], times: LinkTimes, model: str, config: dict[str, Any], backend: str | None
) -> Looked:
    """The link, and what a round waits for on it."""
    over = "" if backend is None else f" over {backend}"
    sums = f"a sum of a row of {times.width} takes {_us(times.row)}, of 16 rows {_us(times.rows)}"
    speed = f"{times.bandwidth / 1e9:.2g} GB/s"
    detail = f"{counted(times.machines, 'machine')}{over}: {sums}; of 8 MiB {speed}"
    checks = [*checks, Check("link", "ok", detail)]
    count = SUMS_PER_LAYER * int(text_config(config).get("num_hidden_layers", 0))
    plain, drafted = (count * each + times.message for each in (times.row, times.rows))
    said = f"{model}: {count} sums and a message: {_ms(plain)} for 1 row, {_ms(drafted)} for 16"
    tokens = published_acceptance(model)
    if tokens is None:
        said += f"; drafting waits less from {drafted / plain:.1f} tokens a round on"
    else:
        said += f"; at {tokens:g} tokens a round {_ms(drafted / tokens)} a token, drafted"
        said += f", {plain * tokens / drafted:.1f}x less than plainly"
    measured = asdict(times) | {
        "model": model,
        "sums": count,
        "plain_seconds": plain,
        "drafted_seconds": drafted,
        "tokens": tokens,
    }
    return Looked([*checks, Check("round", "ok", said)], measured)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} us"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
