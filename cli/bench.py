"""`dflash-mlx bench`: plain, drafted and mlx-lm's own decoding, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
from dflash_mlx.loading.hub import Hub

from . import bench_comparison as comparison
from . import bench_options, options
from . import bench_tables as tables
from .bench_options import EMBEDDED, SOME
from .pair import Choice, open_pair
from .screen import print_json
from .tune_kernels import time_kernels

SEED = 0  # of a benchmark's sampling: the same texts in every run


def bench(
    context: typer.Context,
    model: options.Model = "tiny",
    draft: options.Draft = None,
    target_bits: options.TargetBits = None,
    draft_bits: options.DraftBits = None,
    quant_mode: options.Quantize = options.QuantMode.affine,
    group_size: options.GroupSize = None,
    exact: options.Exact = None,
    offline: options.Offline = False,
    stock_blas: options.StockBlas = False,
    max_tokens: options.MaxTokens = 256,
    block_size: bench_options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    suite: bench_options.Suite = None,
    prompts: bench_options.Prompts = None,
    data: bench_options.Data = None,
    protocol: bench_options.Protocol = None,
    limit: bench_options.Limit = None,
    repeats: bench_options.Repeats = 3,
    context_length: bench_options.ContextLength = None,
    trees: bench_options.Trees = None,
    policy: bench_options.Policy = False,
    sampling: bench_options.Sampling = False,
    kernels: bench_options.Kernels = False,
    tree_budget: bench_options.TreeBudgets = None,
    openai: bench_options.OpenAI = None,
    out: bench_options.Out = None,
    plot: bench_options.Plot = None,
    json: options.Json = False,
) -> None:
    """Measure plain decoding, drafting and mlx-lm on the same prompts, in turns."""
    lengths = _numbers("--context-length", context_length)
    budgets = _numbers("--tree-budget", tree_budget, least=2)
    rules = None if protocol is None else PROTOCOLS[protocol.value]
    if rules is not None:
        _check_protocol(prompts, context)
        repeats = 1
        max_tokens = max_tokens if _is_given("max_tokens", context) else rules.max_tokens
    chosen = _prompts(suite, prompts, limit, Hub(offline=offline), data, rules)
    setup: dict[str, Any] = {
        "suite": str(prompts or ", ".join(suite or [EMBEDDED])),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "seed": SEED if temperature else None,
        "context_lengths": lengths,
        "tree_budget": _budget(trees),
        "protocol": None if protocol is None else protocol.value,
    }
    # A row for each of `tables.MODES`.
    asked_for = {"policy": policy, "sampling": sampling, "tree_budget": bool(budgets)}
    modes = [name for name, wanted in asked_for.items() if wanted]
    others: dict[str, Any] = {"out": out, "openai": openai, "context-length": lengths}
    others |= {"temperature": temperature, "trees": trees, "kernels": kernels and modes}
    _check_alone([*modes, *["kernels"] * kernels], others)
    _check_plot(plot, budgets)
    ours = (draft, block_size, target_bits, draft_bits, lengths, trees)
    if openai and any(ours):
        raise typer.BadParameter("the server decides what it runs", param_hint="--openai")
    choice = Choice(
        model=model,
        draft=draft,
        target_bits=target_bits,
        draft_bits=draft_bits,
        quant_mode=quant_mode,
        group_size=group_size,
        exact=exact,
        offline=offline,
        stock_blas=stock_blas,
        block_size=block_size,
        policy=False,  # whole blocks: what the drafter is worth, not what the policy makes of it
    )
    if kernels:
        time_kernels(choice, json)
        return
    if modes:
        _draw(choice, tables.Asked(chosen, max_tokens, repeats, budgets), modes, plot, json)
        return
    if openai is not None:
        _run(out, json, lambda: comparison.of_server(openai, model, chosen, setup))
    else:
        _run(out, json, lambda: comparison.of_pair(open_pair(choice), chosen, setup))


def _draw(
    choice: Choice, asked: tables.Asked, modes: list[str], plot: Path | None, json: bool
) -> None:
    """Measure and show what is asked for instead, and draw it where --plot says."""
    if plot is not None:
        check_matplotlib()
    drawn = tables.draw(open_pair(choice), asked, modes, json)
    if plot is not None:
        write_picture(plot, draw_trees(drawn))


def _run(out: Path | None, json: bool, measure: Callable[[], dict[str, Any]]) -> None:
    """Measure, show, and write the files, all of them or none."""
    with ExitStack() as stack:
        if out is not None:  # what is in the way is found now, not after an hour of measuring
            check_matplotlib()
            write = stack.enter_context(results_folder(out))
        content = measure()
        if json:
            print_json(content)
        else:
            comparison.show(content)
        if out is not None:
            write(as_files(content, draw_all(content)))


def _check_alone(modes: Sequence[str], others: Mapping[str, Any]) -> None:
    """Raise `BadParameter` for options that were given together with one that measures alone."""
    given = [f"--{name}" for name, value in others.items() if value]
    if modes and given:
        alone = f"--{modes[0].replace('_', '-')}"
        raise typer.BadParameter(f"goes without {', '.join(given)}", param_hint=alone)


def _check_plot(plot: Path | None, budgets: list[int]) -> None:
    """Raise `BadParameter` for a --plot of nothing, or into a folder that is not there."""
    if plot and not budgets:
        raise typer.BadParameter("goes with --tree-budget", param_hint="--plot")
    if plot and not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")


def _check_protocol(prompts: Path | None, context: typer.Context) -> None:
    """Raise `BadParameter` for options that a protocol decides."""
    if prompts is not None:
        raise typer.BadParameter("goes without --protocol", param_hint="--prompts")
    if _is_given("repeats", context):
        raise typer.BadParameter("goes without --protocol", param_hint="--repeats")


def _is_given(parameter: str, context: typer.Context) -> bool:
    """Whether an option was given, and is not its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _numbers(option: str, text: str | None, least: int = 1) -> list[int]:
    """The numbers that an option names."""
    try:
        numbers = [int(number) for number in text.split(",")] if text else []
    except ValueError:
        numbers = [0]
    if any(number < least for number in numbers):
        raise typer.BadParameter(f"give numbers from {least} on, like 16,32", param_hint=option)
    return numbers


def _budget(text: str | None) -> int | str | None:
    """The value of --trees."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 2:
        raise typer.BadParameter("give a number from 2 on, or auto", param_hint="--trees")
    return int(text)


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
