"""Several processes on this machine as the ranks of a cluster, over loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

Rank: TypeAlias = "subprocess.Popen[str]"
HERE = Path(__file__).parent
SECONDS = 240
STALL = 40.0  # for a rank to answer: the machine may be busy with other tests


def free_addresses(count: int) -> list[list[str]]:
    """Addresses that nobody listens on now, one for each rank, as MLX's ring wants them."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [[f"127.0.0.1:{one.getsockname()[1]}"] for one in taken]


def environment(rank: int, hostfile: Path) -> dict[str, str]:
    """What `mlx.launch` tells a rank of a ring."""
    return {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)}


def run_ranks(
    size: int, folder: Path, *arguments: str, seconds: float = SECONDS
) -> list[dict[str, Any]]:
    """Run cluster_rank.py as all ranks; the JSON objects that rank 0 prints, a line each.

    A rank that fails fails the test, with what it said.
    """
    hostfile = folder / "ring.json"
    hostfile.write_text(json.dumps(free_addresses(size)))
    command = [sys.executable, str(HERE / "cluster_rank.py"), *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(rank, hostfile),
            stdout=subprocess.PIPE,
            stderr=(folder / f"{rank}.err").open("w"),
            text=True,
        )
        for rank in range(size)
    ]
    try:
        with ThreadPoolExecutor(size) as pool:
            told = [pool.submit(_output, one, ranks, seconds) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    said = "".join((folder / f"{rank}.err").read_text() for rank in range(size))
    assert [one.returncode for one in ranks] == [0] * size, said
    return [json.loads(line) for line in told[0].result().splitlines() if line.startswith("{")]


def _output(one: Rank, ranks: Sequence[Rank], seconds: float) -> str:
    """What a rank prints to its end. One that fails ends the others, which would wait for it."""
    try:
        return one.communicate(timeout=seconds)[0]
    finally:
        if one.returncode != 0:
            for each in ranks:
                each.kill()


def find(found: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one object with these values."""
    (one,) = (each for each in found if wanted.items() <= each.items())
    return one
