"""Compare our server with mlx-lm's on the same prompts, in turns and with the same BLAS.

    python scripts/beside_mlx_lm.py --concurrency 1,8,32 --repeats 3
    python scripts/beside_mlx_lm.py --model FOLDER -- --draft lookup     what follows -- is for ours
    python scripts/beside_mlx_lm.py --model smollm2 --repeats 1 --max-tokens 48     some 6 minutes
    python scripts/beside_mlx_lm.py --model smollm2 --turns 7 --max-tokens 48       one conversation

Prints tokens per second of all clients, their wait for the first text, and CPU time of the server
process per token, which is the most reliable figure on a busy machine. Medians of the turns.
--turns prints for every turn of a conversation how many tokens of its prompt were reused, the wait
and the CPU time of its whole answer.
"""

from __future__ import annotations

import argparse
import atexit
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
from dflash_mlx.bench.datasets import embedded_prompts
from dflash_mlx.bench.server import ServerClient, measure_concurrency
from dflash_mlx.errors import ServerError
from dflash_mlx.loading.gguf.convert import converted
from dflash_mlx.loading.registry import gguf_file

TINY = f"{dflash_mlx.__path__[0]}/tiny/target"
MLX_LM_SERVER = (
    "import sys, dflash_mlx; dflash_mlx.use_fast_blas()\n"
    "from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"
)
ATTEMPTS = 20
START_SECONDS = 600  # loading the model and timing its forwards
HI = [{"role": "user", "content": "Hi"}]


class ServerProcess:
    """A server in a process of its own.

    Args:
        name: shown in the table.
        command: starts it; the port is appended.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, port = name, _free_port()
        self._log = TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=self._log
        )
        atexit.register(self.process.kill)
        self.client = self._connect(f"http://127.0.0.1:{port}")

    def _connect(self, url: str) -> ServerClient:
        """Wait until the server answers."""
        client = ServerClient(f"{url}/v1", "default_model")  # mlx-lm's name for its own model
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                client.ask(HI, 1, 0.0, 0)
                return client
            except ServerError:
                time.sleep(0.5)
        self._log.seek(0)
        raise SystemExit(f"{self.name} does not start.\n{self._log.read()}")

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the process so far, on Linux."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100  # ticks of user and system

    def measure(self, clients: int, prompts: int, max_tokens: int) -> dict[str, Any]:
        """One turn, repeated if the server refuses a request: mlx-lm's queue is short."""
        for attempt in range(ATTEMPTS):
            before = self.cpu_seconds
            try:
                found = measure_concurrency(
                    self.client, embedded_prompts()[:prompts], clients, max_tokens
                )
                break
            except ServerError as error:
                print(f"{self.name}: {error}", file=sys.stderr)
                if attempt == ATTEMPTS - 1:
                    raise
        cpu = self.cpu_seconds - before
        return found | {"cpu_ms_per_token": 1e3 * cpu / max(1, found["tokens"])}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def line_of(name: str, clients: int, turns: Sequence[dict[str, Any]]) -> str:
    """Medians of the turns."""
    speed = median(one["tokens_per_second"] for one in turns)
    wait = 1e3 * median(one["first_token_seconds"]["median"] for one in turns)
    cpu = median(one["cpu_ms_per_token"] for one in turns)
    return (
        f"{clients:3} clients  {name:11}{speed:8,.0f} tok/s  first text {wait:7,.0f} ms  "
        f"{cpu:6.2f} ms of CPU a token"
    )


def converse(servers: Sequence[ServerProcess], turns: int, max_tokens: int) -> None:
    """A conversation with each server, turn by turn; prints what each turn took."""
    questions = [prompt.messages[-1]["content"] for prompt in embedded_prompts()]
    talks: dict[str, list[dict[str, str]]] = {server.name: [] for server in servers}
    for turn in range(turns):
        for server in servers if turn % 2 == 0 else reversed(servers):
            talk, before = talks[server.name], server.cpu_seconds
            talk.append({"role": "user", "content": questions[turn % len(questions)]})
            result, _ = server.client.ask(talk, max_tokens, 0.0, 0)
            talk.append({"role": "assistant", "content": result.text})
            stats, cpu = result.stats, server.cpu_seconds - before
            print(
                f"turn {turn + 1}  {server.name:11}{stats.reused_tokens:5} of "
                f"{stats.prompt_tokens:5} tokens reused  first text "
                f"{1e3 * stats.first_token_seconds:7,.0f} ms  {cpu:5.2f} s of CPU",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=TINY, help="a folder, a GGUF file, smollm2")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--turns", type=int, help="of one conversation, in place of --concurrency")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("ours", nargs="*", help="further options of dflash-mlx serve")
    args = parser.parse_args()
    model = [] if args.model == TINY else ["--model", args.model]
    gguf = gguf_file(args.model)  # mlx-lm loads the folder that ours is converted to
    folder = args.model if gguf is None else str(converted(gguf, mx.default_device() == mx.cpu))
    python = sys.executable
    servers = [
        ServerProcess("dflash-mlx", [python, "-m", "dflash_mlx", "serve", *model, *args.ours]),
        ServerProcess("mlx-lm", [python, "-c", MLX_LM_SERVER, "--model", folder]),
    ]
    try:
        for server in servers:
            server.measure(1, prompts=1, max_tokens=8)  # warms up
        if args.turns:
            converse(servers, args.turns, args.max_tokens)
            return
        for clients in map(int, args.concurrency.split(",")):
            turns: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
            for turn in range(args.repeats):
                for server in servers if turn % 2 == 0 else reversed(servers):
                    turns[server.name].append(
                        server.measure(clients, args.prompts, args.max_tokens)
                    )
            for name, found in turns.items():
                print(line_of(name, clients, found), flush=True)
    finally:
        for server in servers:
            server.process.terminate()
            server.process.wait()


if __name__ == "__main__":
    main()
