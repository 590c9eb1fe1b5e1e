"""What each machine of a cluster has: run this module there, and read its line of JSON."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..machine.facts import installed
from ..validation import brief
from .hosts import Host

PACKAGES = ("dflash-mlx", "mlx", "mlx-lm")
PROBE_SECONDS = 60.0  # for ssh to connect, and Python to import MLX
_SSH_FAILED, _NOT_FOUND = 255, (126, 127)  # exit codes


@dataclass(frozen=True)
class HostReport:
    """What one machine has.

    Attributes:
        host: the machine.
        versions: of Python and packages, None for a missing one.
        backends: MLX's that it can use.
        problem, advice: why it cannot take part, and what to do; "" if it can.
    """

    host: Host
    versions: dict[str, str | None] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    problem: str = ""
    advice: str = ""


def probe(hosts: Sequence[Host], seconds: float = PROBE_SECONDS) -> list[HostReport]:
    """Ask all machines at the same time."""
    pipe, until = subprocess.PIPE, time.monotonic() + seconds
    asked = [
        subprocess.Popen(
            host.command([sys.executable, "-m", "dflash_mlx.cluster.probe"]),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
        )
        for host in hosts
    ]
    return [_report(host, process, until) for host, process in zip(hosts, asked, strict=True)]


def _report(host: Host, process: subprocess.Popen[str], until: float) -> HostReport:
    try:
        output, errors = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        problem = "has not answered in time"
        return HostReport(host, problem=problem, advice="Is it asleep? Wake it up, and ask again.")
    if process.returncode:
        return _failure(host, process.returncode, errors.strip())
    try:
        content = json.loads(output.strip().splitlines()[-1])
        return HostReport(host, backends=tuple(content.pop("backends")), versions=content)
    except (ValueError, LookupError, TypeError, AttributeError):
        advice = "Does its shell print something by itself? It must not, for ssh."
        return HostReport(host, problem=f"answers {brief(output.strip())}", advice=advice)


def _failure(host: Host, code: int, errors: str) -> HostReport:
    last = (errors.splitlines() or [f"exit code {code}"])[-1]
    if code == _SSH_FAILED and not host.is_here:
        problem = f"ssh does not get there: {last}"
        advice = f"'ssh-copy-id {host.ssh}' once; then 'ssh {host.ssh} true' must ask for nothing."
    elif code in _NOT_FOUND or "No module named" in last:
        problem = f"dflash-mlx is not installed there for {sys.executable}"
        advice = "Install it there in the same folder as here, with the same Python."
    else:
        problem, advice = f"fails: {last}", "Run 'dflash-mlx doctor' there."
    return HostReport(host, problem=problem, advice=advice)


def _backends() -> list[str]:
    try:
        import mlx.core as mx
    except ImportError:
        return []
    return [name for name in ("ring", "jaccl", "mpi") if mx.distributed.is_available(name)]


if __name__ == "__main__":
    versions = {name: installed(name) for name in PACKAGES}
    found = {"Python": platform.python_version(), **versions, "backends": _backends()}
    print(json.dumps(found))
