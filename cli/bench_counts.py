"""`bench --counts`: what rounds of a pair ask of the device, in place of how long they take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_mlx.errors import PromptError

from .output import make_table, note, print_json, stdout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_mlx.bench.datasets import BenchPrompt

    from .pair import Pair


def count_rounds(pair: Pair, prompts: Sequence[BenchPrompt], json: bool) -> None:
    """Print the counts of a plain round and of one of a whole block, of the first long answer."""
    from dflash_mlx.bench.counts import count_round
    from dflash_mlx.bench.measure import encoded

    found = []
    for rows, drafter in {1: None, pair.rows: pair.drafter}.items():
        rounds = (
            count_round(pair.target, drafter, encoded(pair.target, one), rows) for one in prompts
        )
        one = next((one for one in rounds if one is not None), None)
        if one is None:
            raise PromptError("Every answer is over before a round can be counted: ask for more.")
        found.append(one)
    if json:
        print_json({"model": pair.target.name, "rounds": [asdict(one) for one in found]})
        return
    table = make_table("rows", "kernels", "nodes", "copies", "copied", "passes", "waits")
    for one in found:
        graph = one.graph
        table.add_row(
            *map(_shown, (one.rows, graph.launches, graph.nodes, graph.copies)),
            f"{graph.copied_bytes:,} B",
            *map(_shown, (one.passes, one.waits)),
        )
    stdout().print(table)
    note("passes are graphs handed to the device, each a fence; waits those read back at once")


def _shown(number: Any) -> str:
    return f"{number:,}"
