"""`dflash-mlx bench`: plain decoding, drafting and mlx-lm's own decoding on the same prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.bench.datasets import (
    PROTOCOL_MAX_TOKENS,
    BenchPrompt,
    choose_protocol_prompts,
    embedded_prompts,
    limit_per_category,
    read_prompts,
)
from dflash_mlx.bench.report import check_folder, write_run
from dflash_mlx.bench.server import ServerClient
from dflash_mlx.bench.suites import SUITES, suite_prompts
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import EMBEDDED, NONE, known_drafter

from . import bench_tables as tables
from . import options
from .machines import Machines, cluster_member, runs_elsewhere
from .options import DECODING, OFF, OUTPUT, is_given, option, tree_rows
from .output import print_json
from .pair import WHOLE_BLOCKS, open_pair

PROMPTS = "What is measured"  # the group that --help shows
EMBEDDED_SUITE = "embedded"
SUITE_LIMIT = 10  # prompts of a hub suite, unless --limit says otherwise
PROTOCOL = "zlab"  # the one that --protocol knows
SEED = 0  # of sampling, so that every run makes the same texts


# The prefill brings the first token, so it takes two tokens to measure a speed.
MaxTokens = Annotated[
    int, option(DECODING, "N", "Stop after N tokens.", "--max-tokens", "-n", min=2)
]
BlockSize = Annotated[
    int | None,
    option(
        DECODING, "N", "Rows of a step. Default: the drafter's block.", "--block-size", "-b", min=1
    ),
]
Suite = Annotated[
    list[str] | None,
    option(PROMPTS, "NAME", f"{EMBEDDED_SUITE} (default), {', '.join(SUITES)}. Repeatable."),
]
Prompts = Annotated[
    Path | None,
    option(PROMPTS, "FILE", 'JSONL of {"prompt" or "messages", "category", "answer"} instead.'),
]
Data = Annotated[
    Path | None, option(PROMPTS, "DIR", "Read suites from this folder instead of the hub.")
]
Protocol = Annotated[
    str | None,
    option(PROMPTS, "NAME", "zlab: prompts, lengths and means of z-lab's papers."),
]
Limit = Annotated[
    int | None,
    option(PROMPTS, "N", f"Prompts per category. Default: {SUITE_LIMIT} for hub suites.", min=1),
]
Repeats = Annotated[int, option(PROMPTS, "N", "Runs of each prompt and method.", min=1)]
TreeBudget = Annotated[str, option(PROMPTS, "N", "Also measure draft trees of N tokens, or auto.")]
Server = Annotated[
    str | None,
    option(PROMPTS, "URL", "Measure an OpenAI-compatible server; --model is its name there."),
]
Concurrency = Annotated[
    str | None, option(PROMPTS, "N,N", "With --openai: this many clients at once.")
]
Out = Annotated[Path | None, option(OUTPUT, "DIR", "Write bench.json here.", parser=options.named)]


@dataclass(frozen=True)
class BenchNames(options.Names):
    """The model and its drafter, which is measured alone."""

    draft: Annotated[
        str | None,
        option(
            options.MODEL,
            "NAME",
            "A drafter, NAME+lookup or lookup. Default: the known drafter, without lookup.",
            "--draft",
            "-d",
            autocompletion=options.drafters_beginning,
        ),
    ] = None


def bench(
    context: typer.Context,
    *,
    names: BenchNames,
    weights: options.Weights,
    max_tokens: MaxTokens = 256,
    block_size: BlockSize = None,
    temperature: options.Temperature = 0.0,
    suite: Suite = None,
    prompts: Prompts = None,
    data: Data = None,
    protocol: Protocol = None,
    limit: Limit = None,
    repeats: Repeats = 3,
    tree_budget: TreeBudget = OFF,
    openai: Server = None,
    concurrency: Concurrency = None,
    out: Out = None,
    machines: Machines,
    json: options.Json = False,
) -> None:
    """Compare plain decoding, drafting and mlx-lm on the same prompts, taking turns."""
    if runs_elsewhere(machines, names, weights, context):
        return
    if names.draft == NONE:
        raise typer.BadParameter(f"must not be {NONE} here: name a drafter", param_hint="--draft")
    budget = tree_rows(tree_budget)
    clients = _numbers(concurrency)
    if protocol is not None:
        if protocol != PROTOCOL:
            raise typer.BadParameter(f"must be {PROTOCOL}", param_hint="--protocol")
        repeats = 1
        max_tokens = max_tokens if is_given("max_tokens", context) else PROTOCOL_MAX_TOKENS
    hub = Hub(offline=weights.offline)
    chosen = _prompts(suite, prompts, limit, hub, data, protocol is not None)
    setup: dict[str, Any] = {
        "suite": str(prompts or ", ".join(suite or [EMBEDDED_SUITE])),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "seed": SEED if temperature else None,
        "tree_budget": budget,
        "protocol": protocol,
    }
    if out is not None:  # hours of measuring must not end in a folder that cannot be written
        check_folder(out)
    if openai is not None:
        client = ServerClient.find(openai, None if names.model == EMBEDDED else names.model)
        if clients:
            tables.measure_clients(client, chosen, clients, setup, json)
            return
        content = tables.measure_server(client, chosen, setup)
    else:
        network = replace(names, draft=names.draft or known_drafter(names.model))
        # Whole blocks: what the drafter is worth, without the policy's choice of draft length.
        steps = replace(WHOLE_BLOCKS, block_size=block_size)
        pair = open_pair(network, weights, steps, member=cluster_member(context))
        content = tables.measure_pair(pair, chosen, setup)
    if json:
        print_json(content)
    else:
        tables.show(content)
    if out is not None:
        write_run(out, content)


def _numbers(text: str | None) -> list[int]:
    """The numbers of --concurrency."""
    try:
        numbers = [int(number) for number in text.split(",")] if text else []
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise typer.BadParameter("must be positive numbers, like 1,8", param_hint="--concurrency")
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
            raise typer.BadParameter(f"{name} is not one of {known}", param_hint="--suite")
        chosen += found if limit is None else limit_per_category(found, limit)
    return chosen
