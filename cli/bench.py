"""`dflash-mlx bench`: plain decoding, drafting and mlx-lm on the same prompts."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .bench_report import ended_early, overall_acceptance_length, show
from .bench_run import BenchRun
from .machines import Machines, cluster_member, runs_elsewhere
from .options import OUTPUT, given, option
from .pair import Pair, open_pair, template_variables

if TYPE_CHECKING:
    from dflash_mlx.cluster.cluster import Cluster

PROMPTS = "What is measured"  # a panel of --help
EMBEDDED_SUITE = "embedded"
SUITE_LIMIT = 10  # prompts per category of a hub suite, unless --limit says otherwise
PROTOCOL = "zlab"  # the only value of --protocol
SEED = 0  # the seed of sampling, so that every run makes the same texts
SUITE = f"{EMBEDDED_SUITE} (default), {', '.join(SUITES)}. Repeatable."
FILE = 'Measure JSON lines of {"prompt" or "messages", "category", "answer"}.'
LIMIT = f"Prompts per category. Default: {SUITE_LIMIT} for hub suites."
ZLAB = "zlab: measure as z-lab's papers do (prompts, lengths, means)."
BLOCK = "Verify N tokens per step. Default: the drafter's maximum."
TREES = "Also measure draft trees of N tokens, or auto."
CLIENTS = "With --openai: how many clients ask at the same time."
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
    suite: list[str] | None = option(None, panel=PROMPTS, metavar="NAME", help=SUITE),
    prompts: Path | None = option(None, panel=PROMPTS, metavar="FILE", help=FILE),
    data: Path | None = option(
        None,
        panel=PROMPTS,
        metavar="DIR",
        help="Read the suites from this folder, not from the hub.",
    ),
    protocol: str | None = option(None, panel=PROMPTS, metavar="NAME", help=ZLAB),
    limit: int | None = option(None, panel=PROMPTS, metavar="N", help=LIMIT, min=1),
    repeats: int = option(
        3,
        panel=PROMPTS,
        metavar="N",
        help="Runs of each prompt and method.",
        min=1,
    ),
    tree_budget: int | str | None = options.setting("tree_budget", help=TREES, panel=PROMPTS),
    openai: str | None = option(None, panel=PROMPTS, metavar="URL", help=SERVED),
    concurrency: str | None = option(None, panel=PROMPTS, metavar="N,N", help=CLIENTS),
    out: Path | None = option(
        None,
        panel=OUTPUT,
        metavar="DIR",
        help="Write bench.json here.",
    ),
    machines: Machines,
    json: bool = options.JSON,
) -> None:
    """Compare plain decoding, drafting and mlx-lm on the same prompts, in turns.

    Each step drafts as many tokens as the drafter can.

    `generate` drafts fewer where that is faster, and adds lookup.
    """
    if runs_elsewhere(machines, names=names, weights=weights, context=context):
        return
    _check_settings(names, max_tokens, protocol)
    clients = [] if concurrency is None else _numbers(concurrency)
    if protocol is not None:
        repeats = 1
        max_tokens = max_tokens if "max_tokens" in given(context) else PROTOCOL_MAX_TOKENS
    hub = Hub(offline=weights.offline)
    chosen = _choose_prompts(
        suite,
        file=prompts,
        limit=limit,
        hub=hub,
        folder=data,
        by_protocol=protocol is not None,
    )
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
            _measure_clients(client, prompts=chosen, counts=clients, setup=setup, json=json)
            return
        content = _measure_server(client, prompts=chosen, setup=setup, out=out)
    else:
        content = _measure_model(
            names,
            weights,
            block_size=block_size,
            member=cluster_member(context),
            prompts=chosen,
            setup=setup,
            out=out,
        )
    _report(content, out, json)


def _check_settings(names: options.Names, max_tokens: int, protocol: str | None) -> None:
    """Raise `SettingsError` for settings that leave nothing to measure."""
    if names.draft == NONE:
        raise SettingsError(f"--draft must not be {NONE} here: name a drafter.")
    if max_tokens < 2:  # the prefill produces the first token
        raise SettingsError(f"--max-tokens must be 2 or more to measure a speed, not {max_tokens}.")
    if protocol is not None and protocol != PROTOCOL:
        raise SettingsError(f"--protocol must be {PROTOCOL}, not {protocol!r}.")


def _report(content: dict[str, Any], out: Path | None, json: bool) -> None:
    """Write and print what was measured. Exits with `INTERRUPTED` after Ctrl-C."""
    if out is not None:
        write_run(out, content)
    if json:
        output.print_json(content)
    else:
        show(content)
    if ended_early(content):
        raise typer.Exit(INTERRUPTED)


def _numbers(text: str) -> list[int]:
    """Parse the numbers of clients. Raises `SettingsError`."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(numbers):
        raise SettingsError(f"--concurrency must be positive numbers, like 1,8, not {text!r}.")
    return numbers


def _choose_prompts(
    suites: list[str] | None,
    file: Path | None,
    limit: int | None,
    hub: Hub,
    folder: Path | None,
    by_protocol: bool,
) -> list[BenchPrompt]:
    """Return the prompts to measure. Raises `DataError` and the errors of `suite_prompts`."""
    if file is not None:
        prompts = read_prompts(file)
        return prompts if limit is None else limit_per_category(prompts, limit)
    chosen = []
    for name in suites or [EMBEDDED_SUITE]:
        if name == EMBEDDED_SUITE:
            prompts = embedded_prompts()
        elif name in SUITES:
            prompts = suite_prompts(name, hub, folder)
            if by_protocol:
                prompts = choose_protocol_prompts(prompts)
            elif limit is None:
                prompts = limit_per_category(prompts, SUITE_LIMIT)
        else:
            names = ", ".join((EMBEDDED_SUITE, *SUITES))
            raise SettingsError(f"--suite must be one of {names}, not {name!r}.")
        chosen += prompts if limit is None else limit_per_category(prompts, limit)
    return chosen


def _measure_model(
    names: options.Names,
    weights: options.Weights,
    block_size: int | None,
    member: Cluster | None,
    prompts: list[BenchPrompt],
    setup: Mapping[str, Any],
    out: Path | None,
) -> dict[str, Any]:
    """Load a model and measure it. Returns the content of bench.json.

    With an adapter, the model is measured without it as well, to compare acceptance.
    """
    network = replace(names, draft=names.draft or known_drafter(names.model))
    # Full blocks show what the drafter is worth without the policy's choice of draft length.
    settings = {"block_size": block_size}
    pair = open_pair(network, weights, settings=settings, member=member)
    content = _measure_pair(pair, prompts=prompts, setup=setup, out=out)
    if names.adapter is not None and not ended_early(content):
        del pair
        gc.collect()  # frees the tuned target before the next one is loaded
        untuned_names = replace(network, adapter=None)
        untuned = open_pair(untuned_names, weights, settings=settings, member=member)
        untuned_content = _measure_pair(
            untuned,
            prompts=prompts,
            setup={**setup, "repeats": 1, "tree_budget": None},
            with_mlx_lm=False,
        )
        content["untuned_acceptance_length"] = overall_acceptance_length(untuned_content)
    return content


def _measure_pair(
    pair: Pair,
    prompts: list[BenchPrompt],
    setup: Mapping[str, Any],
    with_mlx_lm: bool = True,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure plain decoding, drafting and mlx-lm. Returns the content of bench.json."""
    from dflash_mlx.bench.measure import WARM_UP_TOKENS, measure_all

    settings = {"max_tokens": setup["max_tokens"]}
    if setup["temperature"]:
        settings |= {"temperature": setup["temperature"], "seed": setup["seed"]}
    trees = _tree_settings(pair, setup["tree_budget"])
    with_mlx_lm = with_mlx_lm and pair.member is None
    run = BenchRun(
        {
            "model": pair.target.name,
            "title": pair.title,
            "block_size": pair.rows,
            **setup,
            "machine": machine(pair.blas),
        },
        prompts=prompts,
        methods=2 + with_mlx_lm + (trees is not None),
        out=out,
    )
    run.warm_up_tokens = min(WARM_UP_TOKENS, setup["max_tokens"])
    measured = measure_all(
        pair.target,
        pair.drafter,
        prompts=prompts,
        repeats=setup["repeats"],
        settings=settings,
        template=template_variables(pair.target, setup),
        drafting={"block_size": pair.block_size},
        trees=trees,
        with_mlx_lm=with_mlx_lm,
        ran=run.count,
    )
    return run.collect(measured)


def _tree_settings(pair: Pair, budget: int | str | None) -> dict[str, Any] | None:
    """Return the settings that draft trees; None without a budget."""
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
    """Measure a server as its clients see it. Returns the content of bench.json.

    Raises `ServerError`.
    """
    run = BenchRun(
        {
            "model": client.model,
            "title": f"{client.model} · {client.url}",
            "block_size": None,
            **setup,
            "machine": computer(),
        },
        prompts=prompts,
        methods=1,
        out=out,
    )
    run.warm_up_tokens = min(server_bench.WARM_UP_TOKENS, setup["max_tokens"])
    measured = server_bench.measure_server(
        client,
        prompts,
        repeats=setup["repeats"],
        max_tokens=setup["max_tokens"],
        temperature=setup["temperature"],
        seed=setup["seed"] or 0,
        ran=run.count,
    )
    return run.collect(measured)


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
    max_tokens = setup["max_tokens"]
    sampling = {"temperature": setup["temperature"], "seed": setup["seed"] or 0}
    with output.waiting("Sending one request before anything is timed"):
        client.ask(prompts[0].messages, max_tokens=min(8, max_tokens), **sampling)
    rows = []
    for count in counts:
        with output.waiting(f"{count} at once"):
            rows.append(
                server_bench.measure_concurrency(
                    client,
                    prompts,
                    clients=count,
                    max_tokens=max_tokens,
                    **sampling,
                )
            )
    if json:
        about = {"model": client.model, "url": client.url, **setup, "machine": computer()}
        output.print_json({**about, "concurrency": rows})
        return
    table = output.make_table("clients", "tok/s", "first token", "p95", "gap", "p95 ")
    for row in rows:
        cells = [str(row["clients"]), output.rate(row["tokens_per_second"])]
        for wait in (row["first_token_seconds"], row["gap_seconds"]):
            cells.append(_milliseconds(wait.get("median")))
            cells.append(_milliseconds(wait.get("p95")))
        table.add_row(*cells)
    output.stdout().print(table)
    output.note(f"{client.model} · {client.url}; speed of all clients, median waits and p95")
    if setup["busy"]:
        output.note(setup["busy"])


def _milliseconds(seconds: float | None) -> str:
    return output.NOTHING if seconds is None else f"{1e3 * seconds:,.0f} ms"
