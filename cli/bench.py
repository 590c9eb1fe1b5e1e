"""`dflash-mlx bench`: plain, drafted and mlx-lm's own decoding, side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dflash_mlx.bench.datasets import (
    BenchPrompt,
    embedded_prompts,
    limit_per_category,
    read_prompts,
)
from dflash_mlx.bench.machine import machine

from . import options, tables
from .pair import Choice, Pair, open_pair
from .screen import note, print_json, stderr, stdout

if TYPE_CHECKING:
    from dflash_mlx.bench.report import Measured, Row


def bench(
    model: options.Model = "tiny",
    draft: options.Draft = None,
    target_bits: options.TargetBits = None,
    draft_bits: options.DraftBits = None,
    quant_mode: options.Quantize = options.QuantMode.affine,
    group_size: options.GroupSize = None,
    offline: options.Offline = False,
    stock_blas: options.StockBlas = False,
    max_tokens: options.MaxTokens = 256,
    block_size: options.BlockSize = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSONL of {"prompt" or "messages", "category", "answer"} instead of our own.',
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most N prompts of each category.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Runs of each prompt in each way.")
    ] = 3,
    policy: Annotated[
        bool,
        options.flag(
            "--policy",
            "Instead: is drafting ever slower than not, with four drafters from good to useless?",
            options.OUTPUT,
        ),
    ] = False,
    sampling: Annotated[
        bool,
        options.flag(
            "--sampling",
            "Instead: tokens per round at three temperatures, by five ways to draft.",
            options.OUTPUT,
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure plain decoding, drafting and mlx-lm on the same prompts, in turns."""
    chosen = embedded_prompts() if prompts is None else read_prompts(prompts)
    if limit is not None:
        chosen = limit_per_category(chosen, limit)
    choice = Choice(
        model=model,
        draft=draft,
        target_bits=target_bits,
        draft_bits=draft_bits,
        quant_mode=quant_mode,
        group_size=group_size,
        offline=offline,
        stock_blas=stock_blas,
        block_size=block_size,
    )
    pair = open_pair(choice)
    asked_for = {"policy": policy, "sampling": sampling}  # a row for each of `tables.MODES`
    if modes := [name for name, wanted in asked_for.items() if wanted]:
        tables.draw(pair, tables.Asked(chosen, max_tokens, repeats), modes, json)
        return
    measured = _measure_all(pair, chosen, max_tokens, repeats)
    _report(pair, measured, repeats, json)


def _measure_all(
    pair: Pair, prompts: list[BenchPrompt], max_tokens: int, repeats: int
) -> list[Measured]:
    from dflash_mlx.bench.report import measure

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    measured = []
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task("", total=len(prompts))
        for prompt in prompts:
            progress.update(task, description=prompt.category)
            measured.append(
                measure(pair.target, pair.drafter, prompt, max_tokens, pair.block_size, repeats)
            )
            progress.advance(task)
    return measured


def _report(pair: Pair, measured: list[Measured], repeats: int, json: bool) -> None:
    from dflash_mlx.bench.report import by_category, differences, summarize

    rows, overall = by_category(measured), summarize("all", measured)
    different = differences(measured)
    here = machine(pair.blas)
    if json:
        content: dict[str, Any] = {"model": pair.target.name, "block_size": pair.rows}
        content |= {"repeats": repeats, "machine": here, "overall": asdict(overall)}
        content |= {"categories": [asdict(row) for row in rows], "differences": different}
        print_json(content)
        return
    stdout().print(_table(rows, overall))
    for one in different:
        stdout().print(
            Text(f"not identical from token {one['token'] + 1} on: {one['prompt']}", style="red")
        )
    note(f"{pair.title}; medians; runs of each prompt in each way, in turns: {repeats}")
    note(", ".join(f"{name} {value}" for name, value in here.items()))
    if overall.overhead_ms_per_round is not None:
        note(
            f"overhead per round, beyond the bare forwards: {overall.overhead_ms_per_round:.2f} ms"
        )


def _table(rows: list[Row], overall: Row) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("category")
    for title in ("tokens/round", "plain", "mlx-lm", "DFlash", "speedup", "identical"):
        table.add_column(title, justify="right", no_wrap=True)
    if overall.exact is not None:
        table.add_column("exact", justify="right")
    for row in (*rows, overall):
        cells = [
            row.category,
            f"{row.acceptance_length:.2f}",
            f"{row.plain_tokens_per_second:,.0f}",
            f"{row.mlx_lm_tokens_per_second:,.0f}" if row.mlx_lm_tokens_per_second else "-",
            f"{row.drafted_tokens_per_second:,.0f}",
            f"{row.speedup:.2f}x",
            f"{row.identical}/{row.prompts}",
        ]
        if overall.exact is not None:
            cells.append(f"{row.exact}/{row.with_answer}" if row.with_answer else "-")
        table.add_row(*cells, style="bold" if row is overall else None)
    return table
