"""`dflash-mlx tune`: measure kernels and step costs, which later runs on this machine use."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table

import dflash_mlx

from . import options
from .output import NOTHING, error_line, make_table, note, print_json, stdout, waiting
from .pair import Pair, check_drafts, measuring, open_pair

if TYPE_CHECKING:
    from dflash_mlx import Policy
    from dflash_mlx.bench.kernels import ShapeTiming
    from dflash_mlx.policy.costs import Costs

MILLISECONDS, MICROSECONDS = 1e3, 1e6
CHAINS, TREES = "chains", "trees"
DOUBLINGS = (1, 2, 4, 8)  # the narrow steps that fit a screen; --json has all
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
    """Measure what a model's steps cost here and, on Metal, which kernels are faster."""
    check_drafts(names)
    # Only on macOS, because elsewhere there is no Metal, and the BLAS has to come before MLX.
    kernels = _time_kernels(names, weights, again) if sys.platform == "darwin" else None
    pair = open_pair(names, weights)  # with the kernels that have just won
    costs, kept, corrected = _costs(pair, options.bits_of(kv_bits), again)
    if json:
        content: dict[str, Any] = {"model": pair.target.name, "milliseconds": costs}
        content["corrected_by_rounds"] = corrected
        rows = None if kernels is None else [_kernel_json(row) for row in kernels]
        print_json(content | {"kernels": rows})
        return
    if kernels is not None:
        stdout().print(_kernel_table(kernels), "")
    stdout().print(_cost_table(costs))
    note(f"{pair.title}; {kept}")
    if corrected:
        note("Real steps have corrected these figures since: --again measures anew.")
    if kernels is None:
        note("There is no Metal here, so only costs were measured: our kernels need it.")


def _time_kernels(
    names: options.Names, weights: options.Weights, again: bool
) -> list[ShapeTiming] | None:
    """Time every shape of the model that has no stored timing, and store it; None without Metal.

    Raises the errors of `dflash_mlx.load_target`.
    """
    with waiting("Starting MLX"):
        load_target = dflash_mlx.load_target
        import mlx.core as mx

        from dflash_mlx.bench.kernels import time_shapes
        from dflash_mlx.kernels.choose import read_timings, store_timings
        from dflash_mlx.kernels.modules import Kernels
    if not mx.metal.is_available():
        return None
    with waiting(f"Loading {names.model}"):
        bits = options.bits_of(weights.target_bits)
        target = load_target(names.model, bits, **weights.settings, kernels=False)
    with waiting("Timing every shape, with MLX's kernels and ours in turns"):
        known = {} if again else read_timings()
        rows = list(time_shapes(target.model, target.config, Kernels(), known))
    try:
        store_timings({row.key: row.timing for row in rows})
    except OSError as error:
        error_line(f"The choice of kernels cannot be stored: {error}")
    return rows


def _kernel_table(rows: list[ShapeTiming]) -> Table:
    """The timings, stock / ours, and from how many rows ours runs."""
    counts = [f"{count}" for count in (rows[0].timing.stock if rows else ())]
    table = make_table("microseconds, stock/ours", "layers", *counts, "ours from")
    for row in rows:
        pairs = zip(row.timing.stock.values(), row.timing.ours.values(), strict=True)
        cells = [f"{MICROSECONDS * a:.0f}/{MICROSECONDS * b:.0f}" for a, b in pairs]
        table.add_row(row.key, f"{row.layers}", *cells, f"{row.timing.first_row or NOTHING}")
    return table


def _kernel_json(row: ShapeTiming) -> dict[str, Any]:
    timing = row.timing
    return {
        "shape": row.key,
        "layers": row.layers,
        "stock_us": {rows: MICROSECONDS * value for rows, value in timing.stock.items()},
        "ours_us": {rows: MICROSECONDS * value for rows, value in timing.ours.items()},
        "ours_from": timing.first_row,
    }


def _costs(pair: Pair, kv_bits: int | None, again: bool) -> tuple[dict[str, ByRows], str, bool]:
    """Milliseconds per step, drafting included, by shape, context and rows.

    Also whether later runs find them, in words, and whether real steps have corrected them.
    """
    from dflash_mlx.policy.trees import TreePolicy, tree_policy

    assert pair.drafter is not None  # see check_drafts
    policy = tree_policy(pair.target, pair.drafter, kv_bits, again, measuring)
    if not isinstance(policy, TreePolicy):
        return {CHAINS: _chains(policy.costs)}, _kept(policy), policy.costs.by_rounds
    trees = {
        context: {rows: MILLISECONDS * seconds for rows, seconds in by_rows.items()}
        for context, by_rows in policy.costs.verify.items()  # whole steps, see `measure_trees`
    }
    chains = policy.chains
    return {CHAINS: _chains(chains.costs), TREES: trees}, _kept(chains), chains.costs.by_rounds


def _kept(chains: Policy) -> str:
    """Whether later runs find these costs, in words."""
    from dflash_mlx.policy.costs import read_costs
    from dflash_mlx.policy.kept import UNREADABLE

    with suppress(OSError, *UNREADABLE):
        if chains.file and read_costs(chains.file) == chains.costs:
            return "'generate' and 'chat' use these figures from now on."
    where = "" if chains.file is None else f": {chains.file.parent} cannot be written"
    return f"these figures are not stored{where}."


def _chains(costs: Costs) -> ByRows:
    return {
        context: {
            rows: MILLISECONDS * (seconds + costs.draft[context][rows])
            for rows, seconds in by_rows.items()
        }
        for context, by_rows in costs.verify.items()
    }


def _cost_table(costs: dict[str, ByRows]) -> Table:
    """A row for each shape and context, a column for each number of rows."""
    lines = {
        f"{shape} after {context:,} tokens": figures
        for shape, by_context in costs.items()
        for context, figures in by_context.items()
    }
    measured = {rows for figures in lines.values() for rows in figures}
    counts = sorted(rows for rows in measured if rows > 8 or rows in DOUBLINGS)
    columns = (f"{count}" for count in counts)
    table = make_table("ms per step, by rows", *columns)
    for title, figures in lines.items():
        table.add_row(title, *(_milliseconds(figures.get(rows)) for rows in counts))
    return table


def _milliseconds(figure: float | None) -> str:
    """Three digits, or a dash for what was not measured."""
    if figure is None:
        return NOTHING
    return f"{figure:.0f}" if figure >= 100 else f"{figure:#.3g}"
