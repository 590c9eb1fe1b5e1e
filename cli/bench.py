"""`dflash-mlx bench`: plain, drafted and mlx-lm's own decoding, side by side."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.bench.datasets import (
    BenchPrompt,
    embedded_prompts,
    limit_per_category,
    read_prompts,
)
from dflash_mlx.bench.plots import check_matplotlib, draw_all, draw_trees
from dflash_mlx.bench.report import as_files, results_folder, write_picture
from dflash_mlx.bench.suites import SUITES, suite_prompts
from dflash_mlx.hub import Hub

from . import comparison, options, tables
from .kernels import time_kernels
from .pair import Choice, open_pair
from .screen import print_json

EMBEDDED = "embedded"
SOME = 10  # prompts of a suite of the hub, unless --limit says otherwise
SEED = 0  # of a benchmark's sampling: the same texts in every run
WHAT = "What is measured"


def bench(
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
    block_size: options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"{EMBEDDED} (the default), {', '.join(SUITES)}; several if given several times.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSONL of {"prompt" or "messages", "category", "answer"} instead of a suite.',
            rich_help_panel=WHAT,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"At most N prompts of each category; by default {SOME} of a suite of the hub, "
            "all of others.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Runs of each prompt in each way.", rich_help_panel=WHAT
        ),
    ] = 3,
    context_length: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Put the prompts behind text that makes them so many tokens long.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    policy: Annotated[
        bool,
        options.flag(
            "--policy",
            "Instead: is drafting ever slower than not, with four drafters from good to useless?",
            WHAT,
        ),
    ] = False,
    sampling: Annotated[
        bool,
        options.flag(
            "--sampling",
            "Instead: tokens per round by temperature and way to draft.",
            WHAT,
        ),
    ] = False,
    kernels: Annotated[
        bool,
        options.flag(
            "--kernels",
            "Instead: MLX's kernels against ours for the model's shapes; decides from then on.",
            WHAT,
        ),
    ] = False,
    tree_budget: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Instead: chains against draft trees of these sizes.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Instead: ask an OpenAI-compatible server; --model is its name there.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write JSON, CSV, Markdown and plots into this folder.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to draw what --tree-budget finds.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure plain decoding, drafting and mlx-lm on the same prompts, in turns."""
    lengths = _numbers("--context-length", context_length)
    budgets = _numbers("--tree-budget", tree_budget, least=2)
    chosen = _prompts(suite, prompts, limit, Hub(offline=offline))
    setup: dict[str, Any] = {
        "suite": str(prompts or ", ".join(suite or [EMBEDDED])),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "seed": SEED if temperature else None,
        "context_lengths": lengths,
    }
    # A row for each of `tables.MODES`.
    asked_for = {"policy": policy, "sampling": sampling, "tree_budget": bool(budgets)}
    modes = [name for name, wanted in asked_for.items() if wanted]
    if (modes or kernels) and (out or openai or lengths or temperature or (modes and kernels)):
        raise typer.BadParameter(
            "goes without --out, --openai, --context-length, --temperature and --kernels",
            param_hint=f"--{modes[0].replace('_', '-')}" if modes else "--kernels",
        )
    if plot and not budgets:
        raise typer.BadParameter("goes with --tree-budget", param_hint="--plot")
    if plot and not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
    if openai and (draft or block_size or target_bits or draft_bits or lengths):
        raise typer.BadParameter(
            "goes with --model alone: the server decides what it runs", param_hint="--openai"
        )
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
        if plot is not None:
            check_matplotlib()
        asked = tables.Asked(chosen, max_tokens, repeats, budgets)
        drawn = tables.draw(open_pair(choice), asked, modes, json)
        if plot is not None:
            write_picture(plot, draw_trees(drawn))
        return
    with ExitStack() as stack:
        if out is not None:  # what is in the way is found now, not after an hour of measuring
            check_matplotlib()
            write = stack.enter_context(results_folder(out))
        if openai is not None:
            content = comparison.of_server(openai, model, chosen, setup)
        else:
            content = comparison.of_pair(open_pair(choice), chosen, setup)
        if json:
            print_json(content)
        else:
            comparison.show(content)
        if out is not None:
            write(as_files(content, draw_all(content)))


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
    suites: list[str] | None, file: Path | None, limit: int | None, hub: Hub
) -> list[BenchPrompt]:
    """The prompts asked for. Raises `DataError` and the errors of `suite_prompts`."""
    if suites and file:
        raise typer.BadParameter("goes without --prompts", param_hint="--suite")
    chosen: list[BenchPrompt] = [] if file is None else read_prompts(file)
    for name in suites or ([] if file else [EMBEDDED]):
        if name == EMBEDDED:
            chosen += embedded_prompts()
        elif name in SUITES:
            chosen += limit_per_category(suite_prompts(name, hub), limit or SOME)
        else:
            known = ", ".join((EMBEDDED, *SUITES))
            raise typer.BadParameter(f"{name} is none of {known}", param_hint="--suite")
    return chosen if limit is None else limit_per_category(chosen, limit)
