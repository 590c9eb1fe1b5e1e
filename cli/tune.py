"""`dflash-mlx tune`: measure what later runs on this machine choose by."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

from . import options, tune_kernels
from .output import NOTHING, make_table, note, print_json, stdout
from .pair import Pair, check_drafts, measuring, open_pair

if TYPE_CHECKING:
    from dflash_mlx import Policy
    from dflash_mlx.policy.costs import Costs

MILLISECONDS = 1e3
CHAINS, TREES = "chains", "trees"  # the two shapes of what a round verifies
DOUBLINGS = (1, 2, 4, 8)  # the narrow rows that fit a screen; --json has all
ByRows = dict[int, dict[int, float]]  # context -> rows -> milliseconds

Again = Annotated[
    bool,
    options.flag("--again", options.OUTPUT, "Measure again, even if results are already stored."),
]


def tune(
    *,
    names: options.Names,
    weights: options.Weights,
    kv_bits: options.KvBits = None,
    again: Again = False,
    json: options.Json = False,
) -> None:
    """Measure what a model's rounds cost here and, on Metal, which kernels are faster."""
    check_drafts(names)
    kernels = None
    if sys.platform == "darwin":  # elsewhere there is no Metal, and the BLAS comes before MLX
        kernels = tune_kernels.time_kernels(names, weights, again)
    pair = open_pair(names, weights)  # with the kernels that have just won
    costs, kept, corrected = _costs(pair, options.bits_of(kv_bits), again)
    if json:
        content: dict[str, Any] = {"model": pair.target.name, "milliseconds": costs}
        content["corrected_by_rounds"] = corrected
        rows = None if kernels is None else [tune_kernels.as_json(row) for row in kernels]
        print_json(content | {"kernels": rows})
        return
    if kernels is not None:
        stdout().print(tune_kernels.table(kernels), "")
    stdout().print(_table(costs))
    note(f"{pair.title}; {kept}")
    if corrected:
        note(
            "Rounds took other times, and have corrected what was measured: --again measures anew."
        )
    if kernels is None:
        note("There is no Metal here, so only costs were measured: our kernels need it.")


def _costs(pair: Pair, kv_bits: int | None, again: bool) -> tuple[dict[str, ByRows], str, bool]:
    """Milliseconds of a round, its draft included, by shape, context and rows.

    And who has them, and whether rounds have corrected them.
    """
    from dflash_mlx.policy.trees import TreePolicy, tree_policy

    assert pair.drafter is not None  # it was asked for
    policy = tree_policy(pair.target, pair.drafter, kv_bits, again, measuring)
    if not isinstance(policy, TreePolicy):
        return {CHAINS: _chains(policy.costs)}, _kept(policy), policy.costs.by_rounds
    trees = {
        context: {rows: MILLISECONDS * seconds for rows, seconds in by_rows.items()}
        for context, by_rows in policy.costs.verify.items()  # whole rounds, see `measure_trees`
    }
    chains = policy.chains
    return {CHAINS: _chains(chains.costs), TREES: trees}, _kept(chains), chains.costs.by_rounds


def _kept(chains: Policy) -> str:
    """Whether later runs find these costs."""
    from dflash_mlx.policy.costs import read_costs
    from dflash_mlx.policy.kept import UNREADABLE

    with suppress(OSError, *UNREADABLE):
        if chains.file and read_costs(chains.file) == chains.costs:
            return "from now on 'generate' and 'chat' choose by these figures."
    where = "" if chains.file is None else f": {chains.file.parent} cannot be written"
    return f"these figures are not kept{where}."


def _chains(costs: Costs) -> ByRows:
    return {
        context: {
            rows: MILLISECONDS * (seconds + costs.draft[context][rows])
            for rows, seconds in by_rows.items()
        }
        for context, by_rows in costs.verify.items()
    }


def _table(costs: dict[str, ByRows]) -> Table:
    """A line for each shape and context, a column for each number of rows."""
    lines = {
        f"{shape} after {context:,} tokens": figures
        for shape, by_context in costs.items()
        for context, figures in by_context.items()
    }
    measured = {rows for figures in lines.values() for rows in figures}
    counts = sorted(rows for rows in measured if rows > 8 or rows in DOUBLINGS)
    columns = (f"{count}" for count in counts)
    table = make_table("ms a round, by its rows", *columns)
    for title, figures in lines.items():
        table.add_row(title, *(_milliseconds(figures.get(rows)) for rows in counts))
    return table


def _milliseconds(figure: float | None) -> str:
    """Three digits of it; nothing for what was not measured."""
    if figure is None:
        return NOTHING
    return f"{figure:.0f}" if figure >= 100 else f"{figure:#.3g}"
