"""A width policy on recorded traces, beside every fixed width, at several machines' costs.

    python scripts/policy_simulation.py --traces FILE,FILE [--half 0]
    python scripts/policy_simulation.py --traces FILE,FILE --off 0.06 [--waver 0.06] [--seeds 40]

`policy_traces.py` records the traces. No model runs and nothing is timed, so the figures are exact
and the same everywhere. A policy plays half of each class's prompts (those that its constants were
not chosen by; with `--half 0` those that they were): from nothing at each prompt ("fresh"), and
one after another, class by class ("in turn"). Besides the traces there are drafters made up: right
at some rate whatever the target's certainty says, which is high or wavers.

With `--off` the policy's costs are not what rounds cost: they differ by chance, by about that much
in what all drafted widths share and by two thirds of it in each one's own; and what rounds seem to
take wavers, by `--waver` from one to the next and by as much again from minute to minute. Printed
are the means over `--seeds` machines, of two prompts a class behind one that it learns from.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import exp
from pathlib import Path
from statistics import mean
from typing import Any

from experiment import options_of

from dflash_mlx.policy.beliefs import Certainty
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.rest import WELL, Rest
from dflash_mlx.policy.widths import Policy

FIXED, DEPTH = (1, 2, 4, 8, 16), 64
POLICY = 0  # in the place of a width
# In plain tokens (tiny, smollm2): what a round under the policy takes more than without (features),
# and besides where it looks (certainty); what each row of features that waits for a draft adds.
RESTING, WATCHING, WAITING = {16: 0.025, 8: 0.003}, {16: 0.04, 8: 0.01}, 0.002
Trace = dict[str, Any]  # see `policy_traces`
MADE_UP = {"perfect": (1.0,), "good": (0.93,), "realistic": (0.6, 0.6, 0.5), "bad": (0.1,)}


def machine(verify: dict[int, float], draft: dict[int, float]) -> Costs:
    """Costs in plain tokens, by rows."""
    return Costs({DEPTH: {1: 1.0} | verify}, {DEPTH: {1: 0.0} | draft})


MACHINES = {
    "tiny": {
        "CPU": machine({2: 1.2, 4: 1.25, 8: 1.4, 16: 1.78}, {2: 0.83, 8: 0.95, 16: 1.15}),
        # As its rounds were found to be on another day, when drafts took less (24 November 2026).
        "CPU, quick drafts": machine(
            {2: 1.09, 4: 1.15, 8: 1.27, 12: 1.48, 16: 1.58},
            {2: 0.45, 4: 0.46, 8: 0.52, 12: 0.56, 16: 0.6},
        ),
        "CPU, stock BLAS": machine({16: 4.6}, {2: 0.3, 16: 1.3}),
        "in between": machine({16: 1.8}, {2: 0.25, 16: 0.4}),
        "Mac, rows cost": machine({16: 2.4}, {2: 0.1, 16: 0.15}),
        "Mac, rows do not": machine({16: 1.2}, {2: 0.1, 16: 0.15}),
    },
    "smollm2": {
        "CPU": machine({2: 1.23, 4: 1.34, 8: 1.5}, {2: 0.1, 4: 0.13, 8: 0.19}),
        "CPU, another day": machine({2: 1.19, 4: 1.27, 8: 1.42}, {2: 0.1, 4: 0.13, 8: 0.19}),
        "Mac": machine({2: 1.05, 4: 1.12, 8: 1.25}, {2: 0.1, 8: 0.15}),
    },
}


def play(
    trace: Trace,
    costs: Costs,
    way: int,
    policy: Policy,
    clock: Callable[[float], float] | None = None,
) -> tuple[float, int]:
    """What an answer takes from its second token on, in plain tokens, and its rounds.

    `clock` says what a round seems to take; without one nobody looks.
    """
    seconds, right = costs.rounds(DEPTH, policy.widest), trace["right"]
    request, certainty, waiting = policy.start(trace["temperature"]), Certainty(), trace["prompt"]
    made, spent, rounds, rest, goes_well = 1, 0.0, 0, Rest(), False
    begun = looks_next = looked_ahead = False  # as `Looking` has them
    certainty.take(1, trace["certainty"][0])

    def chosen() -> int:
        return request.width(DEPTH + made, policy.widest, certainty.mean)

    while made < len(right):
        width, asks = way or 1, False
        if way == POLICY and begun:
            asks = looks_next
            if looked_ahead and chosen() > 1:
                rest.end()
            else:
                if looked_ahead:
                    rest.looked(False, certainty.doubt)
                rest.go_on(asks)
        elif way == POLICY and not rest.begin():
            width, asks = chosen(), not goes_well
        begun, looks_next = width == 1 and rest.may_last, rest.looks_next
        accepted = min(right[made - 1], width - 1)
        before, rounds, spent = spent, rounds + 1, spent + seconds[width - 1]
        read = WAITING * waiting if width > 1 else 0.0  # which the watch is told
        if width > 1:
            spent, waiting = spent + read, 0
        waiting, made = waiting + accepted + 1, made + accepted + 1
        if way == POLICY:
            spent += RESTING[policy.widest] + WATCHING[policy.widest] * asks
            took = None if clock is None or rest.now else clock(spent - before - read)
            request.observe(width - 1, accepted, took)
        certainty.take(
            accepted + 1, trace["certainty"][min(made, len(right)) - 1] if asks else None
        )
        goes_well, looked_ahead = accepted >= WELL, rest.now and asks
        if way == POLICY and not rest.now:
            rest.looked(width > 1, certainty.doubt)
    return spent, rounds


def made_up(name: str, sure: bool, seed: int, widest: int, tokens: int = 200) -> Trace:
    """The trace of a drafter that is as good whatever the target's certainty says."""
    luck, rates, right, certainty = random.Random(seed), MADE_UP[name], [], []
    for _ in range(tokens):
        run = 0
        while run < widest - 1 and luck.random() < rates[min(run, len(rates) - 1)]:
            run += 1
        right.append(run)
        certainty.append(0.99999 if sure else luck.choice((0.3, 0.6, 0.9, 0.97, 0.9999)))
    named = f"{name}, {'sure' if sure else 'unsure'}"
    trace = {"class": named, "text": named, "temperature": 0.0, "prompt": 30}
    return trace | {"certainty": certainty, "right": right}


def compare(traces: Sequence[Trace], costs: Costs, policy_of: Callable[[], Policy]) -> str:
    """Each class's share of the best fixed width, and the prompts that became slower."""
    spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    speeds = []
    for trace in traces:
        policy = policy_of()
        widths = [width for width in FIXED if width <= policy.widest]
        times = {way: play(trace, costs, way, policy)[0] for way in (POLICY, *widths)}
        name = trace["class"] + f" T={trace['temperature']:g}" * (trace["temperature"] > 0)
        for way, time in times.items():
            spent[name][way] += time
        if len(trace["right"]) > 1:
            speeds.append((times[1] / times[POLICY], trace["text"][:24]))
    said = []
    for name, ways in spent.items():
        best = min((way for way in ways if way != POLICY), key=ways.__getitem__)
        shares = f"{ways[POLICY] / ways[best]:.3f} of {best} rows"
        said.append(f"    {name:20} {shares:16} {ways[1] / ways[POLICY]:.2f}x plain")
    below = sum(speed < 0.95 for speed, _ in speeds)
    slowest = "{:.2f}x {!r}".format(*min(speeds))
    said.append(f"    {below} of {len(speeds)} below 0.95 of plain decoding; slowest {slowest}")
    return "\n".join(said)


def misjudged(costs: Costs, off: float, luck: random.Random) -> Costs:
    """These costs as a measurement finds them that is off by about so much."""
    shared, found = luck.gauss(0, off), costs.rounds(DEPTH, max(costs.verify[DEPTH]))
    own = [luck.gauss(0, off * 2 / 3) for _ in found]
    said = [max(1.02, s * exp(shared + o)) for s, o in zip(found[1:], own[1:], strict=True)]
    return machine(dict(enumerate(said, 2)), {2: 0.0})


def wavering(waver: float, luck: random.Random) -> Callable[[float], float]:
    """A clock by which one round in fifty stalls."""
    pace = 0.0

    def clock(seconds: float) -> float:
        nonlocal pace
        pace = 0.97 * pace + luck.gauss(0, waver / 4)
        stall = luck.random() * 0.7 if luck.random() < 0.02 else 0.0
        return seconds * exp(pace + stall + luck.gauss(0, waver))

    return clock


def on_machines_that_differ(traces: Sequence[Trace], costs: Costs, options: Any) -> str:
    """Of each class the best fixed width's time over the policy's, and plain decoding's."""
    classes: dict[str, list[Trace]] = defaultdict(list)
    for trace in traces:
        classes[f"{trace['class']} T={trace['temperature']:g}"].append(trace)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in range(options.seeds):
        luck, widest = random.Random(seed), max(costs.verify[DEPTH])
        policy = Policy(misjudged(costs, float(options.off), luck), widest)
        clock = wavering(float(options.waver), luck)
        for of in classes.values():
            play(of[0], costs, POLICY, policy, clock)
        for name, of in classes.items():
            ways = (POLICY, *(width for width in FIXED if width <= widest))
            spent = {
                way: sum(play(trace, costs, way, policy, clock)[0] for trace in of[1:3])
                for way in ways
            }
            best = min(spent[way] for way in ways if way != POLICY)
            found[name].append((best / spent[POLICY], spent[1] / spent[POLICY]))
    said = []
    for name, of_all in [*found.items(), ("all", [each for of in found.values() for each in of])]:
        bests, plains = zip(*of_all, strict=True)
        missed = sum(best < 0.97 for best in bests) / len(bests)
        said.append(
            f"    {name:20} {mean(bests):.4f} of the best width, {missed:4.0%} below 0.97; "
            f"{mean(plains):.2f}x plain, at worst {min(plains):.2f}x"
        )
    return "\n".join(said)


def main() -> None:
    """Simulate and print."""
    options = options_of(
        __doc__ or "", traces="traces.json", half=1, off="0", waver="0.06", seeds=40
    )
    by_pair: dict[str, list[Trace]] = defaultdict(list)
    for name in options.traces.split(","):
        for trace in json.loads(Path(name).read_text()):
            by_pair[trace["pair"]].append(trace)
    for pair, traces in by_pair.items():
        if float(options.off):
            for name, costs in MACHINES[pair].items():
                said = on_machines_that_differ(traces, costs, options)
                print(f"{pair}, {name}, costs off by {options.off}", said, sep="\n")
            continue
        played = half_of(traces, options.half)
        widest = 16 if pair == "tiny" else 8
        alike = [
            made_up(name, sure, seed, widest)
            for name in MADE_UP
            for sure in (True, False)
            for seed in range(8)
        ]
        for name, costs in MACHINES[pair].items():
            in_turn, fresh = Policy(costs, widest), partial(Policy, costs, widest)
            for way, of, policy_of in (
                ("fresh", played, fresh),
                ("in turn", played, lambda policy=in_turn: policy),
                ("made up", alike, fresh),
            ):
                print(f"{pair}, {name}, {way}", compare(of, costs, policy_of), sep="\n")


def half_of(traces: Sequence[Trace], half: int) -> list[Trace]:
    """Every second prompt of each class, class by class."""
    classes = defaultdict(list)
    for trace in traces:
        classes[trace["temperature"], trace["class"]].append(trace)
    return [trace for _, of in sorted(classes.items()) for trace in of[half::2]]


if __name__ == "__main__":
    main()
