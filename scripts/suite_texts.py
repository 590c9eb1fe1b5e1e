"""Tokens a round on whole suites, and whether every text is the plain one: many prompts at once.

    python scripts/suite_texts.py --model smollm2 [--draft NAME] [--data DIR] [--suites NAME,NAME]
        [--limit N] [--max-tokens N] [--temperature T] [--tree-budgets N,N] [--stock-blas]

The prompts are spread evenly over a suite, and an engine decodes 32 of them at a time: first
plainly, then with whole blocks, then with trees of so many rows. What is counted does not depend on
who shares a round, so this is `scripts/suite_speed.py` without its clock, for ten times the prompts
in the same time. Texts that differ are named: with a fast BLAS the order of sums depends on the
number of rows, and two tokens that are equally likely to the last bit may change places.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from experiment import options_of, spread

import dflash_mlx as dm

SUITES = "gsm8k,humaneval,mbpp,mt-bench,math500"


def decode(target: dm.Target, drafter: Any, prompts: list[Any], asked: dict[str, Any]) -> list[Any]:
    """The results of all prompts, in their order."""
    with dm.Engine(target, drafter) as engine:
        jobs = [engine.submit(list(prompt.messages), **asked) for prompt in prompts]
        return [job.result() for job in jobs]


def main() -> None:
    """Decode and print, suite by suite."""
    options = options_of(
        __doc__ or "",
        data="",
        suites=SUITES,
        limit=64,
        max_tokens=256,
        temperature=0.0,
        tree_budgets="",
    )
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")

    from dflash_mlx.bench.suites import suite_prompts
    from dflash_mlx.loading.hub import Hub

    target, drafter = dm.load(options.model, options.draft)
    asked = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": 0}
    ways: dict[str, dict[str, Any]] = {"blocks": {}}
    for budget in filter(None, options.tree_budgets.split(",")):
        ways[f"trees of {budget}"] = {"tree_budget": int(budget)}
    folder = Path(options.data) if options.data else None
    for suite in options.suites.split(","):
        prompts = suite_prompts(suite, Hub(), folder)
        prompts = spread(prompts, options.limit)
        plain = [result.tokens for result in decode(target, None, prompts, asked)]
        for way, settings in ways.items():
            results = decode(target, drafter, prompts, {**asked, **settings})
            tokens = sum(result.stats.round_tokens for result in results)
            rounds = sum(result.stats.rounds for result in results)
            each = fmean(r.stats.acceptance_length for r in results if r.stats.rounds)
            others = [n for n, r in enumerate(results) if r.tokens != plain[n]]
            print(
                f"{suite:10} {way:12} {tokens / rounds:.2f} tokens a round"
                f" (mean of requests {each:.2f}), {tokens} tokens;"
                f" {len(prompts) - len(others)} of {len(prompts)} texts the plain ones"
                f"{f', not {others}' if others else ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
