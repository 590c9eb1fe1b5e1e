"""Our server and mlx-lm's, asked the same prompts in turns; both with the same BLAS.

    python scripts/beside_mlx_lm.py --concurrency 1,8,32 --repeats 3
    python scripts/beside_mlx_lm.py --model FOLDER -- --draft lookup     what follows -- is for ours
    python scripts/beside_mlx_lm.py --model smollm2 --repeats 1 --max-tokens 48     some 6 minutes

Tokens per second of all clients together, how long they wait for the first text, and the CPU time
of the server's process per token: on a busy machine that is the figure to look at. Medians of the
turns; JSON with --json.
"""

from __future__ import annotations

import argparse
import atexit
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import mlx.core as mx

import dflash_mlx
from dflash_mlx.bench.clients import measure_clients
from dflash_mlx.bench.datasets import embedded_prompts
from dflash_mlx.bench.server import Server
from dflash_mlx.errors import ServerError
from dflash_mlx.loading.gguf.convert import converted
from dflash_mlx.loading.registry import gguf_file

TINY = f"{dflash_mlx.__path__[0]}/tiny/target"
THEIRS = (
    "import sys, dflash_mlx; dflash_mlx.use_fast_blas()\n"
    "from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"
)
ATTEMPTS = 20
STARTING = 600  # seconds; a model is loaded, and its forwards timed


class Contestant:
    """A server in a process of its own.

    Args:
        name: in the table.
        command: starts it; its port comes last.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, port = name, _free_port()
        self._said = TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=self._said
        )
        atexit.register(self.process.kill)
        self.server = self._started(f"http://127.0.0.1:{port}")

    def _started(self, url: str) -> Server:
        """Wait until it answers."""
        server = Server(f"{url}/v1", "default_model")  # mlx-lm's name for the one it was given
        end = time.monotonic() + STARTING
        while time.monotonic() < end and self.process.poll() is None:
            try:
                server.ask([{"role": "user", "content": "Hi"}], 1, 0.0, 0)
                return server
            except ServerError:
                time.sleep(0.5)
        self._said.seek(0)
        raise SystemExit(f"{self.name} does not start.\n{self._said.read()}")

    @property
    def cpu_seconds(self) -> float:
        """Of the process, so far."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if stat.exists():
            fields = stat.read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / 100
        told = subprocess.run(
            ["ps", "-o", "time=", "-p", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = 0.0
        for part in told.stdout.strip().split(":"):
            seconds = 60 * seconds + float(part)
        return seconds

    def measure(self, clients: int, args: argparse.Namespace) -> dict[str, Any]:
        """One turn. Begun again where the server turned somebody away: mlx-lm's queue is short."""
        prompts = embedded_prompts()[: args.prompts]
        for attempt in range(ATTEMPTS):
            before = self.cpu_seconds
            try:
                found = measure_clients(self.server, prompts, clients, args.max_tokens)
            except ServerError as error:
                print(f"{self.name}: {error}", file=sys.stderr)
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                break
        cpu = self.cpu_seconds - before
        return found | {"cpu_ms_per_token": 1e3 * cpu / max(1, found["tokens"])}


def folder_of(name: str) -> str:
    """What mlx-lm is to load: of a GGUF file the folder that ours makes of it, and reads."""
    path = gguf_file(name)
    return name if path is None else str(converted(path, unpack=mx.default_device() == mx.cpu))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def row(name: str, clients: int, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the turns."""
    return {
        "server": name,
        "clients": clients,
        "tokens_per_second": round(median(one["tokens_per_second"] for one in turns), 1),
        "first_token_ms": round(
            median(1e3 * one["first_token_seconds"]["median"] for one in turns), 1
        ),
        "cpu_ms_per_token": round(median(one["cpu_ms_per_token"] for one in turns), 3),
        "tokens": turns[0]["tokens"],
    }


def main() -> None:
    """Do it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=TINY, help="a folder, a GGUF file, smollm2")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("ours", nargs="*", help="further options of dflash-mlx serve")
    args = parser.parse_args()
    model = [] if args.model == TINY else ["--model", args.model]
    python = sys.executable
    contestants = [
        Contestant("dflash-mlx", [python, "-m", "dflash_mlx", "serve", *model, *args.ours]),
        Contestant("mlx-lm", [python, "-c", THEIRS, "--model", folder_of(args.model)]),
    ]
    try:
        for one in contestants:
            one.measure(1, argparse.Namespace(prompts=1, max_tokens=8))  # warms up
        for clients in map(int, args.concurrency.split(",")):
            turns: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contestants}
            for turn in range(args.repeats):
                for one in contestants if turn % 2 == 0 else reversed(contestants):
                    turns[one.name].append(one.measure(clients, args))
            for name, found in turns.items():
                told = row(name, clients, found)
                print(json.dumps(told) if args.json else _line(told), flush=True)
    finally:
        for one in contestants:
            one.process.terminate()
            one.process.wait()


def _line(told: dict[str, Any]) -> str:
    parts = (
        f"{told['clients']:3} clients",
        f"{told['server']:11}{told['tokens_per_second']:8,.0f} tok/s",
        f"first text {told['first_token_ms']:7,.0f} ms",
        f"{told['cpu_ms_per_token']:6.2f} ms of CPU a token",
    )
    return "  ".join(parts)


if __name__ == "__main__":
    main()
