"""`dflash-mlx bench`: plain, drafted and mlx-lm's own decoding, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from dflash_mlx.bench.datasets import (
    BenchPrompt,
    embedded_prompts,
    limit_per_category,
    read_prompts,
)
from dflash_mlx.bench.plots import check_matplotlib, draw_all, draw_trees
from dflash_mlx.bench.protocol import PROTOCOLS, Protocol
from dflash_mlx.bench.report import as_files, results_folder, write_picture
from dflash_mlx.bench.suites import SUITES, suite_prompts
from dflash_mlx.errors import MissingDependencyError
from dflash_mlx.loading.hub import Hub
from dflash_mlx.loading.registry import LOOKUP, known_drafter

from . import bench_comparison as comparison
from . import bench_options, options
from .bench_clients import compare_clients
from .bench_counts import count_rounds
from .bench_options import EMBEDDED, SOME
from .bench_trees import compare_trees
from .machines import Machines, joined, shared
from .options import AUTO, OFF, is_given, tree_rows
from .output import note, print_json
from .pair import WHOLE_BLOCKS, check_drafts, open_pair

SEED = 0  # of a benchmark's sampling: the same texts in every run


def bench(
    context: typer.Context,
    *,
    names: options.Names,
    weights: options.Weights,
    max_tokens: bench_options.MaxTokens = 256,
    block_size: bench_options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    suite: bench_options.Suite = None,
    prompts: bench_options.Prompts = None,
    data: bench_options.Data = None,
    protocol: bench_options.Protocol = None,
    limit: bench_options.Limit = None,
    repeats: bench_options.Repeats = 3,
    context_length: bench_options.ContextLength = None,
    tree_budget: bench_options.TreeBudget = OFF,
    trees: bench_options.Trees = None,
    counts: bench_options.Counts = False,
    openai: bench_options.OpenAI = None,
    concurrency: bench_options.Concurrency = None,
    out: bench_options.Out = None,
    plot: bench_options.Plot = None,
    machines: Machines,
    json: options.Json = False,
) -> None:
    """Compare plain decoding, drafting and mlx-lm on the same prompts, taking turns."""
    if machines.hosts and (openai or counts):
        raise typer.BadParameter("goes without --openai and --counts", param_hint="--hosts")
    if shared(machines, names, weights, context):
        return
    check_drafts(names)
    lengths = _numbers("--context-length", context_length)
    sizes = _numbers("--trees", trees, least=2)
    levels = _numbers("--concurrency", concurrency)
    _check_levels(levels, openai, out)
    budget, lookup = tree_rows(tree_budget), names.draft == LOOKUP
    if lookup and isinstance(budget, int):
        raise typer.BadParameter(
            f"{budget} goes without --draft {LOOKUP}", param_hint="--tree-budget"
        )
    if budget == AUTO and block_size is not None:
        raise typer.BadParameter("auto goes without --block-size", param_hint="--tree-budget")
    rules = None if protocol is None else PROTOCOLS[protocol.value]
    if rules is not None:
        _check_protocol(prompts, context)
        repeats = 1
        max_tokens = max_tokens if is_given("max_tokens", context) else rules.max_tokens
    chosen = _prompts(suite, prompts, limit, Hub(offline=weights.offline), data, rules)
    setup: dict[str, Any] = {
        "suite": str(prompts or ", ".join(suite or [EMBEDDED])),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "seed": SEED if temperature else None,
        "context_lengths": lengths,
        "tree_budget": budget,
        "protocol": None if protocol is None else protocol.value,
    }
    others: dict[str, Any] = {"out": out, "openai": openai, "context-length": lengths}
    others[f"draft {LOOKUP}"] = lookup
    _check_trees(sizes, others | {"temperature": temperature, "tree-budget": budget}, plot)
    # Whole blocks of the network alone: what the drafter is worth, not what the policy makes of it.
    rounds = replace(WHOLE_BLOCKS, block_size=block_size)
    bits = (weights.target_bits, weights.draft_bits)
    ours = (names.draft, block_size, *bits, lengths, budget, sizes)
    if openai and (any(ours) or counts):
        raise typer.BadParameter("the server decides what it runs", param_hint="--openai")
    if counts and (out or sizes or budget or lengths):
        raise typer.BadParameter("goes with a pair and prompts alone", param_hint="--counts")
    network = replace(names, draft=names.draft or known_drafter(names.model))
    opened = partial(open_pair, network, weights, rounds, member=joined(context))
    if counts:
        count_rounds(opened(), chosen, json)
    elif sizes:
        if plot is not None:
            check_matplotlib()
        drawn = compare_trees(opened(), chosen, sizes, max_tokens, repeats, json)
        if plot is not None:
            write_picture(plot, draw_trees(drawn))
            note(f"Drawn in {plot}.")
    elif openai is not None and levels:
        compare_clients(comparison.server_at(openai, names.model), chosen, levels, setup, json)
    elif openai is not None:
        _run(out, json, lambda: comparison.of_server(openai, names.model, chosen, setup))
    else:
        _run(out, json, lambda: comparison.of_pair(opened(), chosen, setup))


def _run(out: Path | None, json: bool, measure: Callable[[], dict[str, Any]]) -> None:
    """Measure, show, and write the files, all of them or none."""
    with ExitStack() as stack:
        if out is not None:  # what is in the way is found now, not after an hour of measuring
            write = stack.enter_context(results_folder(out))
        content = measure()
        if json:
            print_json(content)
        else:
            comparison.show(content)
        if out is not None:
            write(as_files(content, _plots(content)))


def _plots(content: Mapping[str, Any]) -> dict[str, bytes]:
    """The pictures of a run; none, with a word about it, where there is nothing to draw with."""
    try:
        return draw_all(content)
    except MissingDependencyError as error:
        note(f"no plots: {error}")
        return {}


def _check_levels(levels: list[int], openai: str | None, out: Path | None) -> None:
    """Raise `BadParameter` for numbers of clients without a server, or with files."""
    if levels and openai is None:
        raise typer.BadParameter("goes with --openai", param_hint="--concurrency")
    if levels and out is not None:
        raise typer.BadParameter("goes without --out", param_hint="--concurrency")


def _check_trees(sizes: list[int], others: Mapping[str, Any], plot: Path | None) -> None:
    """Raise `BadParameter` for options that are not for --trees, or for nothing else."""
    given = [f"--{name}" for name, value in others.items() if value]
    if sizes and given:
        raise typer.BadParameter(f"goes without {', '.join(given)}", param_hint="--trees")
    if plot and not sizes:
        raise typer.BadParameter("goes with --trees", param_hint="--plot")
    if plot and not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
    if plot and plot.suffix.lower() != ".png":
        raise typer.BadParameter(f"is a PNG: name it {plot.stem}.png", param_hint="--plot")
    if plot and plot.exists() and not plot.is_file():
        raise typer.BadParameter(f"{plot} is not a file", param_hint="--plot")


def _check_protocol(prompts: Path | None, context: typer.Context) -> None:
    """Raise `BadParameter` for options that a protocol decides."""
    if prompts is not None:
        raise typer.BadParameter("goes without --protocol", param_hint="--prompts")
    if is_given("repeats", context):
        raise typer.BadParameter("goes without --protocol", param_hint="--repeats")


def _numbers(option: str, text: str | None, least: int = 1) -> list[int]:
    """The numbers that an option names."""
    try:
        numbers = [int(number) for number in text.split(",")] if text else []
    except ValueError:
        numbers = [0]
    if any(number < least for number in numbers):
        raise typer.BadParameter(f"give numbers from {least} on, like 16,32", param_hint=option)
    return numbers


def _prompts(
    suites: list[str] | None,
    file: Path | None,
    limit: int | None,
    hub: Hub,
    folder: Path | None = None,
    rules: Protocol | None = None,
) -> list[BenchPrompt]:
    """The prompts asked for. Raises `DataError` and the errors of `suite_prompts`."""
    if suites and file:
        raise typer.BadParameter("goes without --prompts", param_hint="--suite")
    if folder is not None and not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}", param_hint="--data")
    if folder is not None and not {*(suites or [])} - {EMBEDDED}:
        raise typer.BadParameter("goes with --suite and a suite of the hub", param_hint="--data")
    chosen: list[BenchPrompt] = [] if file is None else read_prompts(file)
    for name in suites or ([] if file else [EMBEDDED]):
        if name == EMBEDDED:
            chosen += embedded_prompts()
        elif name in SUITES:
            found = suite_prompts(name, hub, folder)
            if rules is not None:
                chosen += rules.choose(found)
            else:
                chosen += limit_per_category(found, limit or SOME)
        else:
            known = ", ".join((EMBEDDED, *SUITES))
            raise typer.BadParameter(f"{name} is none of {known}", param_hint="--suite")
    return chosen if limit is None else limit_per_category(chosen, limit)
