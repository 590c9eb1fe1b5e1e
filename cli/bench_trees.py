"""`dflash-mlx bench --trees`: chains against draft trees, instead of the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.machine.facts import machine

from .output import make_table, note, print_json, stdout, waiting
from .pair import Pair

if TYPE_CHECKING:
    from dflash_mlx.bench.trees import TreeRow


def compare_trees(
    pair: Pair,
    prompts: list[BenchPrompt],
    budgets: Sequence[int],
    max_tokens: int,
    repeats: int,
    json: bool,
) -> dict[str, Any]:
    """Measure and print; returns what --json prints. Raises `PromptError`."""
    from dflash_mlx.bench.trees import tree_rows
    from dflash_mlx.prompt import encode_prompt

    assert pair.drafter is not None  # bench always drafts
    asked = [(one.category, encode_prompt(pair.target, one.messages)) for one in prompts]
    with waiting("Chains, trees of each size, and as many rows as pay"):
        rows = tree_rows(pair.target, pair.drafter, asked, budgets, max_tokens, repeats)
    about = machine(pair.blas)
    content: dict[str, Any] = {"model": pair.target.name, "machine": about}
    content |= {"block_size": pair.rows, "prompts": len(asked), "repeats": repeats}
    content["tree_budget"] = [asdict(row) for row in rows]
    if json:
        print_json(content)
    else:
        stdout().print(_table(rows))
        note(", ".join(f"{name} {value}" for name, value in about.items()))
    return content


def _table(rows: list[TreeRow]) -> Table:
    """A column for each way to draft: categories and figures are too many to be columns."""
    table = make_table("tokens/round", *(row.way for row in rows), padding=1)
    for category in rows[0].tokens_per_round:
        table.add_row(category, *(f"{row.tokens_per_round[category]:.2f}" for row in rows))
    table.add_row("T = 1", *(_length(row.with_noise) for row in rows))
    table.add_row("without noise", *(_length(row.without_noise) for row in rows))
    table.add_row("tokens/s", *(f"{row.tokens_per_second:,.0f}" for row in rows))
    table.add_row("over plain", *(f"{row.over_plain:.2f}x" for row in rows))
    table.add_row("auto over it", *(f"{row.auto_over:.2f}x" for row in rows))
    table.add_row("identical", *(f"{row.identical}/{row.runs}" for row in rows))
    return table


def _length(tokens_per_round: float | None) -> str:
    return "-" if tokens_per_round is None else f"{tokens_per_round:.2f}"
