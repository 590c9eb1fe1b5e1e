"""What `bench` measures and prints instead of the comparison: `--policy`, `--sampling`, trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dflash_mlx.bench.datasets import BenchPrompt
from dflash_mlx.machine.facts import machine

from .pair import Pair
from .screen import note, print_json, stdout, waiting

if TYPE_CHECKING:
    from dflash_mlx.bench.never_slower import PolicyRow
    from dflash_mlx.bench.sampled import SampledRow
    from dflash_mlx.bench.trees import TreeRow

LONG = 200  # tokens of an answer on which the policy is judged


@dataclass(frozen=True)
class Asked:
    """What a mode measures on: prompts, tokens of an answer, runs in each way, rows of trees."""

    prompts: list[BenchPrompt]
    max_tokens: int
    repeats: int
    budgets: Sequence[int] = ()

    def token_ids(self, pair: Pair) -> list[list[int]]:
        """The prompts as the target reads them. Raises `PromptError`."""
        from dflash_mlx.prompt import encode_prompt

        return [encode_prompt(pair.target, prompt.messages) for prompt in self.prompts]


def draw(pair: Pair, asked: Asked, modes: Sequence[str], json: bool) -> dict[str, Any]:
    """Measure and print these of the `MODES`; returns what --json prints."""
    content: dict[str, Any] = {"model": pair.target.name, "machine": machine(pair.blas)}
    for name in modes:
        content[name], table = MODES[name](pair, asked)
        if not json:
            stdout().print(table)
    if json:
        print_json(content)
    else:
        note(", ".join(f"{name} {value}" for name, value in content["machine"].items()))
    return content


def _policy(pair: Pair, asked: Asked) -> tuple[list[dict[str, Any]], Table]:
    assert pair.drafter is not None  # bench always drafts
    from dflash_mlx.bench.never_slower import long_answers, policy_rows

    with waiting("Four drafters, each at every width"):
        answers = long_answers(pair.target, asked.token_ids(pair), LONG)
        rows = list(policy_rows(pair.target, pair.drafter, answers, asked.repeats))
    return [asdict(row) for row in rows], _policy_table(rows)


def _sampling(pair: Pair, asked: Asked) -> tuple[list[dict[str, Any]], Table]:
    assert pair.drafter is not None  # bench always drafts
    from dflash_mlx.bench.sampled import sampled_rows

    ids = asked.token_ids(pair)
    with waiting("Three temperatures, five ways to draft"):
        rows = list(sampled_rows(pair.target, pair.drafter, ids, asked.max_tokens))
    return [asdict(row) | {"share": row.share_of_best} for row in rows], _sampled_table(rows)


def _trees(pair: Pair, asked: Asked) -> tuple[list[dict[str, Any]], Table]:
    assert pair.drafter is not None  # bench always drafts
    from dflash_mlx.bench.trees import tree_rows

    categories = [prompt.category for prompt in asked.prompts]
    prompts = list(zip(categories, asked.token_ids(pair), strict=True))
    with waiting("Chains, trees of each size, and as many rows as pay"):
        rows = tree_rows(
            pair.target, pair.drafter, prompts, asked.budgets, asked.max_tokens, asked.repeats
        )
    return [asdict(row) for row in rows], _trees_table(rows)


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


def _trees_table(rows: list[TreeRow]) -> Table:
    """A column for each way to draft: categories and figures are too many to be columns."""
    table = _new_table("tokens/round", *(row.way for row in rows))
    for category in rows[0].tokens_per_round:
        table.add_row(category, *(f"{row.tokens_per_round[category]:.2f}" for row in rows))
    table.add_section()
    table.add_row("T = 1", *(_length(row.with_noise) for row in rows))
    table.add_row("without noise", *(_length(row.without_noise) for row in rows))
    table.add_section()
    table.add_row("tokens/s", *(f"{row.tokens_per_second:,.0f}" for row in rows))
    table.add_row("over plain", *(f"{row.over_plain:.2f}x" for row in rows))
    table.add_row("auto over it", *(f"{row.auto_over:.2f}x" for row in rows))
    table.add_row("identical", *(f"{row.identical}/{row.runs}" for row in rows))
    return table


def _length(tokens_per_round: float | None) -> str:
    return "-" if tokens_per_round is None else f"{tokens_per_round:.2f}"


def _new_table(first: str, *titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


# What `bench` can measure instead of the comparison: each is an option of that name, and gives
# the rows of --json and the table people see.
MODES: dict[str, Callable[[Pair, Asked], tuple[list[dict[str, Any]], Table]]] = {
    "policy": _policy,
    "sampling": _sampling,
    "tree_budget": _trees,
}
