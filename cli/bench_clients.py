"""`bench --openai URL --concurrency N,N`: a server under several clients at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.bench.clients import measure_clients
from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.bench.server import Server
from dflash_mlx.machine.facts import computer

from .output import make_table, note, print_json, stdout, waiting


def compare_clients(
    server: Server,
    prompts: Sequence[BenchPrompt],
    levels: Sequence[int],
    setup: Mapping[str, Any],
    json: bool,
) -> None:
    """Measure each number of clients, and show them side by side. Raises `ServerError`."""
    settings = setup["max_tokens"], setup["temperature"], setup["seed"] or 0
    with waiting("Warming up"):
        server.ask(prompts[0].messages, min(8, setup["max_tokens"]), *settings[1:])
    measured = []
    for clients in levels:
        with waiting(f"{clients} at once"):
            measured.append(measure_clients(server, prompts, clients, *settings))
    if json:
        what = {"model": server.model, "url": server.url, **setup, "machine": computer()}
        print_json({**what, "concurrency": measured})
        return
    table = make_table("clients", "tok/s", "first token", "p95", "gap", "p95 ")
    for one in measured:
        waits = (one[name] for name in ("first_token_seconds", "gap_seconds"))
        cells = [_ms(wait.get(key)) for wait in waits for key in ("median", "p95")]
        table.add_row(str(one["clients"]), f"{one['tokens_per_second']:,.0f}", *cells)
    stdout().print(table)
    note(f"{server.model} · {server.url}; tokens a second of all together, medians and tails")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"
