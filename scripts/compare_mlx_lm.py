"""Compare our server with mlx-lm's on the same prompts, in turns and with the same BLAS.

    python scripts/compare_mlx_lm.py --concurrency 1,8,32 --repeats 3
    python scripts/compare_mlx_lm.py --model FOLDER --ours "--draft lookup"
    python scripts/compare_mlx_lm.py --model smollm2 --repeats 1 --max-tokens 48    # 6 minutes
    python scripts/compare_mlx_lm.py --model smollm2 --turns 7 --max-tokens 48      # one chat

A model is a folder, a GGUF file, tiny or smollm2; --ours are further options of dflash-mlx serve.
Prints tokens per second of all clients, their wait for the first text, and CPU time of the server
process per token, which is the most reliable figure on a busy machine. Medians of the turns.
--turns prints for every turn of a conversation how many tokens of its prompt were reused, the wait
and the CPU time of its whole answer.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from experiment import in_turns, numbers, options_of

from dflash_mlx.bench.datasets import embedded_prompts
from dflash_mlx.bench.server_bench import ServerClient, measure_concurrency
from dflash_mlx.errors import ServerError
from dflash_mlx.loading.hub import Hub, find
from dflash_mlx.loading.load import ensure_downloaded

MLX_LM_SERVER = (
    "import sys, dflash_mlx; dflash_mlx.use_fast_blas()\n"
    "from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"
)
ATTEMPTS = 20  # at a turn of which the server refuses a request
START_SECONDS = 600  # loading the model and timing its forwards
HI = [{"role": "user", "content": "Hi"}]


class ServerProcess:
    """A server in a separate process, which is stopped when the `with` block ends.

    Args:
        name: shown in the table.
        command: starts it; the port is appended.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log = TemporaryFile("w+")
        with socket.create_server(("127.0.0.1", 0)) as bound:
            port = bound.getsockname()[1]
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=self._log
        )
        # mlx-lm's name for its own model
        self.client = ServerClient(f"http://127.0.0.1:{port}/v1", "default_model")

    def __enter__(self) -> ServerProcess:
        """Wait until the server answers."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.client.ask(HI, 1, 0.0, 0)
                return self
            except ServerError:
                time.sleep(0.5)
        self._log.seek(0)
        self.__exit__()
        raise SystemExit(f"{self.name} does not start.\n{self._log.read()}")

    def __exit__(self, *_: Any) -> None:
        self.process.terminate()
        self.process.wait()

    @property
    def cpu_seconds(self) -> float:
        """User and system CPU seconds of the process so far, on Linux."""
        # After the program's name, which is in brackets and may hold spaces, values 11 and 12 are
        # utime and stime (man proc_pid_stat), in ticks of 1/100 second.
        values = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(values[11]) + int(values[12])
        return ticks / 100

    def measure(self, clients: int, prompts: int, max_tokens: int) -> dict[str, Any]:
        """The figures of one turn: those of `measure_concurrency`, and "cpu_ms_per_token".

        A turn is repeated if the server refuses a request, because mlx-lm's queue is short.

        Args:
            clients: how many ask at the same time.
            prompts: how many of the embedded prompts they ask, all together.
            max_tokens: of each answer.
        """
        questions = embedded_prompts()[:prompts]
        for attempt in range(ATTEMPTS):
            before = self.cpu_seconds
            try:
                speed = measure_concurrency(
                    self.client, prompts=questions, clients=clients, max_tokens=max_tokens
                )
                break
            except ServerError as error:
                print(f"{self.name}: {error}", file=sys.stderr)
                if attempt == ATTEMPTS - 1:
                    raise
        cpu_ms = 1e3 * (self.cpu_seconds - before)
        return speed | {"cpu_ms_per_token": cpu_ms / max(1, speed["tokens"])}

    def answer(self, talk: list[dict[str, str]], question: str, max_tokens: int) -> str:
        """Ask the next question of a conversation, and append question and answer to `talk`.

        Returns a line to print: tokens reused, the wait for the first text, and CPU seconds.
        """
        before = self.cpu_seconds
        talk.append({"role": "user", "content": question})
        result, _ = self.client.ask(talk, max_tokens, 0.0, 0)
        talk.append({"role": "assistant", "content": result.text})
        stats = result.stats
        cpu = self.cpu_seconds - before
        return (
            f"{self.name:11}{stats.reused_tokens:5} of {stats.prompt_tokens:5} tokens reused  "
            f"first text {1e3 * stats.first_token_seconds:7,.0f} ms  {cpu:5.2f} s of CPU"
        )


def line_of(clients: int, name: str, turns: Sequence[dict[str, Any]]) -> str:
    """A line of the table: medians over the turns, which are results of `measure`."""
    speed = median(turn["tokens_per_second"] for turn in turns)
    wait = 1e3 * median(turn["first_token_seconds"]["median"] for turn in turns)
    cpu = median(turn["cpu_ms_per_token"] for turn in turns)
    return (
        f"{clients:3} clients  {name:11}{speed:8,.0f} tok/s  first text {wait:7,.0f} ms  "
        f"{cpu:6.2f} ms of CPU a token"
    )


def converse(servers: Sequence[ServerProcess], turns: int, max_tokens: int) -> None:
    """A conversation with each server, turn by turn; prints what each turn took."""
    questions = [prompt.question for prompt in embedded_prompts()[:turns]]
    talks: list[list[dict[str, str]]] = [[] for _ in servers]
    for turn, question in enumerate(questions, start=1):
        for server, talk in zip(servers, talks, strict=True):
            print(f"turn {turn}  {server.answer(talk, question, max_tokens)}", flush=True)


def main() -> None:
    """Measure and print."""
    args = options_of(
        __doc__,
        model="tiny",
        concurrency="1,8,32",
        repeats=3,
        prompts=32,
        turns=0,
        max_tokens=64,
        ours="",
    )
    # mlx-lm loads the folder that a GGUF file is converted to.
    folder = str(ensure_downloaded(find(args.model, Hub()), Hub()).path)
    ours = ["-m", "dflash_mlx", "serve", "--model", args.model, *shlex.split(args.ours)]
    commands = {"dflash-mlx": ours, "mlx-lm": ["-c", MLX_LM_SERVER, "--model", folder]}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(name, [sys.executable, *command]))
            for name, command in commands.items()
        ]
        for server in servers:
            server.measure(1, prompts=1, max_tokens=8)  # warms up
        if args.turns:
            converse(servers, args.turns, args.max_tokens)
            return
        for clients in numbers(args.concurrency):
            turns = {
                server.name: partial(server.measure, clients, args.prompts, args.max_tokens)
                for server in servers
            }
            for name, measured in in_turns(turns, args.repeats).items():
                print(line_of(clients, name, measured), flush=True)


if __name__ == "__main__":
    main()
