"""`dflash-mlx bench`: plain decoding, drafting and mlx-lm on the same prompts."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from dflash_mlx.bench import server_bench
from dflash_mlx.bench.datasets import (
    PROTOCOL_MAX_TOKENS,
    SUITES,
    BenchPrompt,
    choose_protocol_prompts,
    embedded_prompts,
    limit_per_category,
    read_prompts,
    suite_prompts,
)
from dflash_mlx.bench.results import check_folder, write_run
from dflash_mlx.bench.server_bench import ServerClient
from dflash_mlx.errors import SettingsError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED, NONE, known_drafter
from dflash_mlx.machine.facts import busy, computer, machine

from . import options, output
from .bench_report import acceptance_of, ended_early, show
from .bench_run import BenchRun
from .machines import Machines, cluster_member, runs_elsewhere
from .options import OUTPUT, given, option
from .pair import Pair, open_pair, template_variables

PROMPTS = "What is measured"  # the group that --help shows
EMBEDDED_SUITE = "embedded"
SUITE_LIMIT = 10  # prompts of a hub suite, unless --limit says otherwise
PROTOCOL = "zlab"  # the one that --protocol knows
SEED = 0  # of sampling, so that every run makes the same texts
SUITE = f"{EMBEDDED_SUITE} (default), {', '.join(SUITES)}. Repeatable."
FILE = 'JSONL of {"prompt" or "messages", "category", "answer"} instead.'
LIMIT = f"Prompts per category. Default: {SUITE_LIMIT} for hub suites."
ZLAB = "zlab: prompts, lengths and means of z-lab's papers."
BLOCK = "Rows of a step. Default: the drafter's block."
TREES = "Also measure draft trees of N tokens, or auto."
CLIENTS = "With --openai: this many clients at once."
INTERRUPTED = 130  # the exit code of shells
SERVED = "Measure an OpenAI-compatible server; --model is its name there."


def bench(
    context: typer.Context,
    *,
    names: options.Names,
    weights: options.Weights,
    max_tokens: int = options.setting("max_tokens"),
    block_size: int | None = options.setting("block_size", help=BLOCK),
    temperature: float = options.setting("temperature"),
    thinking: dict[str, Any] = options.settings("think", "reasoning_effort"),
    suite: list[str] | None = option(None, PROMPTS, "NAME", SUITE),
    prompts: Path | None = option(None, PROMPTS, "FILE", FILE),
    data: Path | None = option(None, PROMPTS, "DIR", "Read suites from here, not the hub."),
    protocol: str | None = option(None, PROMPTS, "NAME", ZLAB),
    limit: int | None = option(None, PROMPTS, "N", LIMIT, min=1),
    repeats: int = option(3, PROMPTS, "N", "Runs of each prompt and method.", min=1),
    tree_budget: int | str | None = options.setting("tree_budget", help=TREES, panel=PROMPTS),
    openai: str | None = option(None, PROMPTS, "URL", SERVED),
    concurrency: str | None = option(None, PROMPTS, "N,N", CLIENTS),
    out: Path | None = option(None, OUTPUT, "DIR", "Write bench.json here.", parser=options.named),
    machines: Machines,
    json: bool = options.JSON,
) -> None:
    """Compare plain decoding, drafting and mlx-lm on the same prompts, taking turns.

    The drafter is measured alone and in whole blocks: `generate` adds lookup and chooses lengths.
    """
    if runs_elsewhere(machines, names, weights, context):
        return
    if names.draft == NONE:
        raise SettingsError(f"--draft must not be {NONE} here: name a drafter.")
    if max_tokens < 2:  # the prefill brings the first
        raise SettingsError(f"--max-tokens must be 2 or more to measure a speed, not {max_tokens}.")
    clients = [] if concurrency is None else _numbers(concurrency)
    if protocol is not None:
        if protocol != PROTOCOL:
            raise SettingsError(f"--protocol must be {PROTOCOL}, not {protocol!r}.")
        repeats = 1
        max_tokens = max_tokens if "max_tokens" in given(context) else PROTOCOL_MAX_TOKENS
    hub = Hub(offline=weights.offline)
    chosen = _prompts(suite, prompts, limit, hub, data, protocol is not None)
    setup: dict[str, Any] = {
        "suite": str(prompts or ", ".join(suite or [EMBEDDED_SUITE])),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "seed": SEED if temperature else None,
        "tree_budget": tree_budget,
        "protocol": protocol,
        **thinking,
        "busy": busy(),
    }
    if out is not None:  # hours of measuring must not end in a folder that cannot be written
        check_folder(out)
    if openai is not None:
        client = ServerClient.find(openai, None if names.model == EMBEDDED else names.model)
        if clients:
            _measure_clients(client, chosen, clients, setup, json)
            return
        content = _measure_server(client, chosen, setup, out)
    else:
        network = replace(names, draft=names.draft or known_drafter(names.model))
        # Whole blocks: what the drafter is worth, without the policy's choice of draft length.
        opening: dict[str, Any] = {"settings": {"block_size": block_size}}
        opening["member"] = cluster_member(context)  # of which none has an adapter
        content = _measure_pair(open_pair(network, weights, **opening), chosen, setup, out=out)
        if names.adapter is not None and not ended_early(content):
            gc.collect()  # the tuned target makes room
            untuned = open_pair(replace(network, adapter=None), weights, **opening)
            once = setup | {"repeats": 1, "tree_budget": None}
            found = _measure_pair(untuned, chosen, once, with_mlx_lm=False)
            content["untuned_acceptance_length"] = acceptance_of(found)
    if out is not None:
        write_run(out, content)
    if json:
        output.print_json(content)
    else:
        show(content)
    if ended_early(content):
        raise typer.Exit(INTERRUPTED)


def _numbers(text: str) -> list[int]:
    numbers = [int(one) if one.strip().isdecimal() else 0 for one in text.split(",")]
    if not all(numbers):
        raise SettingsError(f"--concurrency must be positive numbers, like 1,8, not {text!r}.")
    return numbers


def _prompts(
    suites: list[str] | None,
    file: Path | None,
    limit: int | None,
    hub: Hub,
    folder: Path | None,
    by_protocol: bool,
) -> list[BenchPrompt]:
    """The prompts to measure. Raises `DataError` and the errors of `suite_prompts`."""
    if file is not None:
        chosen = read_prompts(file)
        return chosen if limit is None else limit_per_category(chosen, limit)
    chosen = []
    for name in suites or [EMBEDDED_SUITE]:
        if name == EMBEDDED_SUITE:
            found = embedded_prompts()
        elif name in SUITES:
            found = suite_prompts(name, hub, folder)
            if by_protocol:
                found = choose_protocol_prompts(found)
            elif limit is None:
                found = limit_per_category(found, SUITE_LIMIT)
        else:
            known = ", ".join((EMBEDDED_SUITE, *SUITES))
            raise SettingsError(f"--suite must be one of {known}, not {name!r}.")
        chosen += found if limit is None else limit_per_category(found, limit)
    return chosen


def _measure_pair(
    pair: Pair,
    prompts: list[BenchPrompt],
    setup: Mapping[str, Any],
    with_mlx_lm: bool = True,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure plain decoding, drafting and mlx-lm. Returns the content of bench.json."""
    from dflash_mlx.bench.measure import WARM_UP_TOKENS, measure_all

    names = ("max_tokens", "temperature", "seed") if setup["temperature"] else ("max_tokens",)
    settings = {name: setup[name] for name in names}
    further: dict[str, Any] = {
        "template": template_variables(pair.target, setup),
        "drafting": {"block_size": pair.block_size},
        "trees": _tree_settings(pair, setup["tree_budget"]),
        "with_mlx_lm": with_mlx_lm and pair.member is None,
    }
    methods = 2 + further["with_mlx_lm"] + (further["trees"] is not None)
    about = {"model": pair.target.name, "title": pair.title, "block_size": pair.rows}
    run = BenchRun({**about, **setup, "machine": machine(pair.blas)}, prompts, methods, out)
    run.warm_up_tokens = min(WARM_UP_TOKENS, setup["max_tokens"])
    return run.collect(
        measure_all(
            *(pair.target, pair.drafter, prompts, setup["repeats"], settings),
            ran=run.count,
            **further,
        )
    )


def _tree_settings(pair: Pair, budget: int | str | None) -> dict[str, Any] | None:
    from dflash_mlx import DraftPolicy

    if budget is None:
        return None
    settings: dict[str, Any] = {"block_size": pair.block_size}
    if isinstance(budget, int):
        return settings | {"tree_budget": budget}
    assert pair.drafter is not None  # bench always drafts
    return settings | {"policy": DraftPolicy.of(pair.target, pair.drafter, trees=True)}


def _measure_server(
    client: server_bench.ServerClient,
    prompts: list[BenchPrompt],
    setup: Mapping[str, Any],
    out: Path | None,
) -> dict[str, Any]:
    """Measure a server from outside. Returns the content of bench.json. Raises `ServerError`."""
    settings = (setup["repeats"], setup["max_tokens"], setup["temperature"], setup["seed"] or 0)
    title = f"{client.model} · {client.url}"
    about = {"model": client.model, "title": title, "block_size": None}
    run = BenchRun({**about, **setup, "machine": computer()}, prompts, 1, out)
    run.warm_up_tokens = min(server_bench.WARM_UP_TOKENS, setup["max_tokens"])
    return run.collect(server_bench.measure_server(client, prompts, *settings, run.count))


def _measure_clients(
    client: server_bench.ServerClient,
    prompts: Sequence[BenchPrompt],
    counts: Sequence[int],
    setup: Mapping[str, Any],
    json: bool,
) -> None:
    """Measure a server with each number of clients, and show a row for each.

    Raises `ServerError`.
    """
    settings = (setup["max_tokens"], setup["temperature"], setup["seed"] or 0)
    with output.waiting("Asking once before anything is timed"):
        client.ask(prompts[0].messages, min(8, settings[0]), *settings[1:])
    rows = []
    for count in counts:
        with output.waiting(f"{count} at once"):
            rows.append(server_bench.measure_concurrency(client, prompts, count, *settings))
    if json:
        about = {"model": client.model, "url": client.url, **setup, "machine": computer()}
        output.print_json({**about, "concurrency": rows})
        return
    table = output.make_table("clients", "tok/s", "first token", "p95", "gap", "p95 ")
    for row in rows:
        waits = (row["first_token_seconds"], row["gap_seconds"])
        cells = [_milliseconds(wait.get(key)) for wait in waits for key in ("median", "p95")]
        table.add_row(str(row["clients"]), output.rate(row["tokens_per_second"]), *cells)
    output.stdout().print(table)
    output.note(f"{client.model} · {client.url}; speed of all clients, median waits and p95")
    if setup["busy"]:
        output.note(setup["busy"])


def _milliseconds(seconds: float | None) -> str:
    return output.NOTHING if seconds is None else f"{1e3 * seconds:,.0f} ms"
