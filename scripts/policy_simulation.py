"""A width policy on recorded traces, beside every fixed width, at several machines' costs.

    python scripts/policy_simulation.py [--traces traces.json] [--kept 1]

`policy_traces.py` records the traces. No model runs and nothing is timed, so the figures are exact
and the same everywhere; what a round costs beyond its forwards is not in them. A policy starts from
nothing at each prompt, or with `--kept 1` one serves all of them. Besides the traces there are
drafters made up: right at some rate whatever the target's certainty says, which is high or wavers.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

from experiment import options_of
from policy_traces import WIDTHS

from dflash_mlx.policy.beliefs import Certainty
from dflash_mlx.policy.costs import ROWS, Costs
from dflash_mlx.policy.widths import Policy

FIXED, WIDEST, DEPTH, LONGEST = (1, 2, 4, 8, 16), 16, 64, 256
POLICY = 0  # in the place of a width
Trace = dict[str, Any]  # see `policy_traces`
MADE_UP = {"perfect": (1.0,), "good": (0.93,), "realistic": (0.6, 0.6, 0.5), "bad": (0.1,)}


def machine(verify: float, draft: float, widest_draft: float) -> Costs:
    """Costs in plain tokens: of 16 rows, of the narrowest draft, and of the widest one."""
    drafts = {row: draft + (widest_draft - draft) * (row - 2) / 14 for row in ROWS}
    return Costs(
        {DEPTH: {row: 1 + (verify - 1) * (row - 1) / 15 for row in ROWS}},
        {DEPTH: drafts | {1: 0.0}},
    )


MACHINES = {
    "CPU": machine(1.7, 0.5, 0.65),
    "CPU, another day": machine(1.8, 0.7, 0.75),
    "CPU, stock BLAS": machine(4.6, 0.3, 1.3),
    "in between": machine(1.8, 0.25, 0.4),
    "Mac, rows cost": machine(2.4, 0.1, 0.15),
    "Mac, rows do not": machine(1.2, 0.1, 0.15),
}


def play(trace: Trace, costs: Costs, way: int, policy: Policy) -> tuple[float, int]:
    """What an answer takes from its second token on, in plain tokens, and its rounds."""
    seconds, request, certainty = costs.rounds(DEPTH, WIDEST), policy.start(), Certainty()
    tokens, place, spent, rounds = len(trace["right"]), 1, 0.0, 0
    certainty.take(1, trace["certainty"][0])
    while place < tokens:
        limit = min(WIDEST, LONGEST + 1 - place)
        width = way or request.width(DEPTH + place, limit, certainty.mean)
        width = min(width, limit)
        accepted = _right(trace["right"][place], width)
        spent, rounds = spent + seconds[width - 1], rounds + 1
        place += accepted + 1
        if way == POLICY:
            request.observe(width - 1, accepted)
        certainty.take(accepted + 1, trace["certainty"][min(place, tokens) - 1])
    return spent, rounds


def _right(by_width: Sequence[int], width: int) -> int:
    return 0 if width == 1 else min(by_width[bisect_left(WIDTHS, width)], width - 1)


def made_up(name: str, sure: bool, seed: int, tokens: int = 200) -> Trace:
    """The trace of a drafter that is as good whatever the target's certainty says."""
    luck, rates, right, certainty = random.Random(seed), MADE_UP[name], [], []
    for _ in range(tokens):
        run = 0
        while run < WIDEST - 1 and luck.random() < rates[min(run, len(rates) - 1)]:
            run += 1
        right.append([min(run, width - 1) for width in WIDTHS])
        certainty.append(-1e-5 if sure else log(luck.choice((0.3, 0.6, 0.9, 0.97, 0.9999))))
    named = f"{name}, {'sure' if sure else 'unsure'}"
    return {"class": named, "text": named, "certainty": certainty, "right": right}


def compare(traces: Sequence[Trace], costs: Costs, kept: bool) -> None:
    """Print the classes' shares of the best fixed width, and the prompts that became slower."""
    spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    policy, slower = Policy(costs, WIDEST), []
    for trace in traces:
        policy = policy if kept else Policy(costs, WIDEST)
        times = {way: play(trace, costs, way, policy)[0] for way in (POLICY, *FIXED)}
        for way, time in times.items():
            spent[trace["class"]][way] += time
        slower.append((times[1] / times[POLICY], f"{trace['text'][:24]!r}"))
    for name, ways in spent.items():
        best = min(FIXED, key=ways.__getitem__)
        print(f"    {name:20} {ways[POLICY] / ways[best]:.3f} of {best:>2} rows")
    below = sorted(one for one in slower if one[0] < 0.95)
    said = ", ".join(f"{speed:.2f} {text}" for speed, text in below[:3])
    print(
        f"    {len(below)} of {len(traces)} below 0.95 of plain decoding{': ' * bool(said)}{said}"
    )


def main() -> None:
    """Simulate and print."""
    options = options_of(__doc__ or "", traces="traces.json", kept=0)
    recorded = json.loads(Path(options.traces).read_text())
    others = [
        made_up(n, sure, seed) for n in MADE_UP for sure in (True, False) for seed in range(8)
    ]
    for name, costs in MACHINES.items():
        print(
            f"{name}: 2, 4, 8, 16 rows",
            *(f"{costs.rounds(DEPTH, 16)[r - 1]:.2f}" for r in FIXED[1:]),
        )
        compare(recorded, costs, bool(options.kept))
        foxes = [
            play(t, costs, POLICY, Policy(costs, WIDEST))[1] for t in recorded if "fox" in t["text"]
        ]
        print("    rounds of the fox:", *foxes)
        compare(others, costs, kept=False)


if __name__ == "__main__":
    main()
