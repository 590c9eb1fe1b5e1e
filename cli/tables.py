"""What `bench --policy` and `bench --sampling` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.bench.machine import machine

from .pair import Pair
from .screen import note, print_json, stdout, waiting

if TYPE_CHECKING:
    from dflash_mlx.bench.never_slower import PolicyRow
    from dflash_mlx.bench.sampled import SampledRow

LONG = 200  # tokens of an answer on which the policy is judged


def draw(
    pair: Pair,
    prompts: list[BenchPrompt],
    max_tokens: int,
    repeats: int,
    policy: bool,
    sampling: bool,
    json: bool,
) -> None:
    """Measure and print what was asked for."""
    from dflash_mlx.bench.sampled import sampled_rows
    from dflash_mlx.prompt import encode_prompt

    ids = [encode_prompt(pair.target, prompt.messages) for prompt in prompts]
    content: dict[str, Any] = {"model": pair.target.name, "machine": machine(pair.blas)}
    if policy:
        with waiting("Four drafters, each at every width"):
            rows = _policy_rows(pair, ids, repeats)
        content["policy"] = [asdict(row) for row in rows]
        if not json:
            stdout().print(_policy_table(rows))
    if sampling:
        with waiting("Three temperatures, five ways to draft"):
            sampled = list(sampled_rows(pair.target, pair.drafter, ids, max_tokens))
        content["sampling"] = [asdict(row) | {"share": row.share_of_best} for row in sampled]
        if not json:
            stdout().print(_sampled_table(sampled))
    if json:
        print_json(content)
    else:
        note(", ".join(f"{name} {value}" for name, value in content["machine"].items()))


def _policy_rows(pair: Pair, ids: list[list[int]], repeats: int) -> list[PolicyRow]:
    from dflash_mlx.bench.never_slower import long_answers, policy_rows

    answers = long_answers(pair.target, ids, LONG)
    return list(policy_rows(pair.target, pair.drafter, answers, repeats))


def _policy_table(rows: list[PolicyRow]) -> Table:
    titles = ("over plain", "over the best width", "best width", "its speed", "drafted rounds")
    table = _new_table("drafter", *titles)
    for row in rows:
        best = "plain" if row.best_width == 1 else str(row.best_width)
        table.add_row(
            row.drafter,
            f"{row.over_plain:.2f}x",
            f"{row.over_best:.2f}x",
            best,
            f"{row.best_over_plain:.2f}x",
            f"{row.drafted_rounds:.0%}",
        )
    return table


def _sampled_table(rows: list[SampledRow]) -> Table:
    ways = ("learnt s", "s = 1", "argmax", "independent", "rejection")
    table = _new_table("temperature", *ways, "of best", "s", "identical")
    for row in rows:
        lengths = (row.learnt, row.one, row.argmax, row.independent, row.rejection)
        table.add_row(
            f"{row.temperature}",
            *(f"{length:.2f}" for length in lengths),
            f"{row.share_of_best:.3f}",
            f"{row.sharpness:g}",
            f"{row.identical}/{row.prompts}",
        )
    return table


def _new_table(first: str, *titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table
