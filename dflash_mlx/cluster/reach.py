"""Whether the machines of a cluster can be reached as ranks are started, and what they have."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..validation import brief
from .hosts import Host
from .ranks import command_on

PROBE = "dflash_mlx.cluster.probe"
PROBE_SECONDS = 60.0  # ssh connects, and Python imports MLX, perhaps for the first time
SSH_FAILED, NOT_FOUND = 255, (126, 127)


@dataclass(frozen=True)
class Reached:
    """One machine.

    Attributes:
        host: which.
        versions: of Python and packages, None for one that is not there.
        backends: of MLX that can be used.
        problem, advice: why it cannot take part, and what to do; "" where it can.
    """

    host: Host
    versions: dict[str, str | None] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    problem: str = ""
    advice: str = ""


def reach(hosts: Sequence[Host], seconds: float = PROBE_SECONDS) -> list[Reached]:
    """Ask all machines at once."""
    pipe, until = subprocess.PIPE, time.monotonic() + seconds
    asked = [
        subprocess.Popen(
            command_on(host, [sys.executable, "-m", PROBE]),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
        )
        for host in hosts
    ]
    return [_answer(host, process, until) for host, process in zip(hosts, asked, strict=True)]


def _answer(host: Host, process: subprocess.Popen[str], until: float) -> Reached:
    try:
        said, wrong = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        problem = "has not answered in time"
        return Reached(host, problem=problem, advice="Is it asleep? Wake it up, and ask again.")
    if process.returncode:
        return _refused(host, process.returncode, wrong.strip())
    try:
        content = json.loads(said.strip().splitlines()[-1])
        backends = tuple(content.pop("backends"))
    except (ValueError, LookupError, TypeError, AttributeError):
        advice = "Does its shell print something by itself? It must not, for ssh."
        return Reached(host, problem=f"answers {brief(said.strip())}", advice=advice)
    return Reached(host, content, backends)


def _refused(host: Host, code: int, wrong: str) -> Reached:
    """Why there was no answer, from what was said instead of it."""
    last = (wrong.splitlines() or [f"exit code {code}"])[-1]
    if code == SSH_FAILED and not host.is_here:
        problem = f"ssh does not get there: {last}"
        advice = f"'ssh-copy-id {host.ssh}' once; then 'ssh {host.ssh} true' must ask for nothing."
    elif code in NOT_FOUND:
        problem = f"there is no {sys.executable}"
        advice = "Install dflash-mlx there in the same folder as here, with the same Python."
    elif "No module named" in last:
        problem = f"dflash-mlx is not installed there for {sys.executable}"
        advice = "Install there what is installed here."
    else:
        problem, advice = f"fails: {last}", "Run 'dflash-mlx doctor' there."
    return Reached(host, problem=problem, advice=advice)
