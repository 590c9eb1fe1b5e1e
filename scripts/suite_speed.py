"""Fixed widths, trees, the policy and plain decoding on the papers' suites, side by side.

    python scripts/suite_speed.py --model smollm2 [--data DIR] [--suites NAME,NAME] [--limit N]
        [--widths 2,4,8] [--trees 8,auto] [--lookup 0|1] [--max-tokens N] [--temperature T]
        [--taught N] [--stock-blas]

The prompts are spread evenly over a suite, and each text goes on by 16 tokens in every way before
the next 16: a machine's pace changes. A policy decodes all of them, and learns as it does for
somebody who chats; its costs are those that are kept, measured now where there are none, and it
begins with what earlier starts have kept of their drafts. `--taught N` has it decode N other
prompts of each suite first. With `--trees` there are rounds of such trees, too, `auto` as large as
pays, and with `--lookup 1` a policy that has a lookup beside the network.

Prints tokens a round and the speed over plain decoding of each, the policy's share of the best
width's, and whether every text was the plain one. `--data` is as in `dflash-mlx bench`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiment import in_turns, options_of, spread

import dflash_mlx as dm

Ways = dict[str, tuple[Any, dict[str, Any]]]  # a drafter, and settings
SUITES = "gsm8k,humaneval,mbpp,mt-bench,math500"


def main() -> None:
    """Measure and print, suite by suite."""
    options = options_of(
        __doc__ or "",
        data="",
        suites=SUITES,
        limit=4,
        max_tokens=96,
        temperature=0.0,
        taught=0,
        widths="2,4,8",
        trees="",
        lookup=0,
    )
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")

    from dflash_mlx.bench.suites import suite_prompts
    from dflash_mlx.loading.hub import Hub

    target, drafter = dm.load(options.model, options.draft)
    asked = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": 0}
    ways = ways_of(options, target, drafter)
    dm.generate(target, drafter, "warm up", max_tokens=8)
    folder = Path(options.data) if options.data else None
    suites = {name: suite_prompts(name, Hub(), folder) for name in options.suites.split(",")}
    teach(ways, target, [one for of in suites.values() for one in others(of, options)], asked)
    for suite, prompts in suites.items():
        prompts = spread(prompts, options.limit)
        tokens, rounds, seconds = (dict.fromkeys(ways, 0.0) for _ in range(3))
        same = 0
        for prompt in prompts:
            streams = {
                way: dm.stream_generate(target, drafter, list(prompt.messages), **asked, **settings)
                for way, (drafter, settings) in ways.items()
            }
            done = in_turns(streams)
            for way, (stats, _) in done.items():
                tokens[way] += stats.round_tokens
                rounds[way] += stats.rounds
                seconds[way] += stats.decode_seconds
            same += all(text == done["plain"][1] for _, text in done.values())
        speed = {way: tokens[way] / seconds[way] for way in ways}
        best = max(speed[way] for way in ways if way == "plain" or way.endswith(" rows"))
        said = ", ".join(
            f"{way} {tokens[way] / rounds[way]:.2f} tokens a round "
            f"{speed[way] / speed['plain']:.2f}x"
            for way in ways
            if way != "plain"
        )
        print(f"{suite:12} {said}; the policy has {speed['policy'] / best:.3f} of the best width's")
        print(f"{'':12} {same} of {len(prompts)} texts the plain ones", flush=True)
    print(*ways["policy"][1]["policy"].describe(256), sep="\n")


def others(prompts: Sequence[Any], options: argparse.Namespace) -> Sequence[Any]:
    """Prompts of a suite that are not timed, to learn from."""
    timed = spread(prompts, options.limit)
    further = spread(prompts, options.limit, first=1)
    return [prompt for prompt in further if prompt not in timed][: options.taught]


def teach(ways: Ways, target: dm.Target, prompts: Sequence[Any], asked: dict[str, Any]) -> None:
    """Have every policy decode these prompts."""
    for drafter, settings in ways.values():
        for prompt in prompts if "policy" in settings else ():
            dm.generate(target, drafter, list(prompt.messages), **asked, **settings)


def ways_of(options: argparse.Namespace, target: dm.Target, drafter: Any) -> Ways:
    """A drafter and settings of each way to decode."""
    from dflash_mlx.drafter.combined import CombinedDrafter
    from dflash_mlx.policy.trees import TreePolicy, tree_policy

    ways: Ways = {"plain": (None, {})}
    for width in map(int, options.widths.split(",")):
        ways[f"{width} rows"] = drafter, {"block_size": width}
    for budget in filter(None, options.trees.split(",")):
        kept = tree_policy(target, drafter) if budget == "auto" else TreePolicy.fixed(int(budget))
        ways[f"trees {budget}"] = drafter, {"policy": kept}
    if options.lookup:
        both = CombinedDrafter(drafter)
        ways["lookup beside"] = both, {"policy": dm.Policy.of(target, both)}
    ways["policy"] = drafter, {"policy": dm.Policy.of(target, drafter)}
    return ways


if __name__ == "__main__":
    main()
