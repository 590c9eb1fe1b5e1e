"""Is drafting ever slower than not drafting? The policy against plain decoding and fixed widths.

    python scripts/never_slower.py [--model NAME] [--limit N] [--repeats N] [--stock-blas]

Four drafters, from one that helps to ones that cannot: the pair's own, one that is right at 0.3,
one that is always wrong, and the pair's own made as slow as five target forwards. Every
contestant decodes the same prompts in turns, and a policy starts from nothing at each prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from experiment import experiment, options_of

import dflash_mlx as dm
from dflash_mlx.drafter.protocol import Drafter, block_size
from dflash_mlx.policy.costs import pair_costs

WIDTHS = (2, 4, 8, 16)
LONG = 200  # tokens of an answer on which the policy is judged


@dataclass(frozen=True)
class PolicyRow:
    """One drafter: medians over the prompts of paired runs.

    Attributes:
        drafter: what drafted.
        over_plain: the policy's tokens per second over plain decoding's.
        over_best: over the best fixed width's, where plain decoding counts as one.
        best_width: the fixed width with the highest median speed.
        best_over_plain: its speed over plain decoding's.
        drafted_rounds: the share of the policy's rounds that drafted.
        prompts: how many there were.
    """

    drafter: str
    over_plain: float
    over_best: float
    best_width: int
    best_over_plain: float
    drafted_rounds: float
    prompts: int


def long_answers(
    target: dm.Target, prompts: Sequence[list[int]], tokens: int
) -> list[tuple[list[int], list[int]]]:
    """The prompts, each with the `tokens` tokens that plain decoding answers if it may not end."""
    settings: dict[str, Any] = {"max_tokens": tokens, "logit_bias": never_ending(target)}
    return [(prompt, dm.generate(target, None, prompt, **settings).tokens) for prompt in prompts]


def never_ending(target: dm.Target) -> dict[int, float]:
    """A logit bias under which no text ends before its `max_tokens`."""
    return dict.fromkeys(target.tokenizer.eos_token_ids, -1e4)


def policy_rows(
    target: dm.Target,
    drafter: Drafter,
    answers: Sequence[tuple[list[int], list[int]]],
    repeats: int,
) -> Iterator[PolicyRow]:
    """A row for each drafter, over prompts and their greedy answers."""
    from contestants import Oracle, Slow  # they import MLX, which comes after the BLAS

    size = target.vocab_size
    yield _row("its own", target, [drafter] * len(answers), answers, repeats)
    for name, p in (("right at 0.3", 0.3), ("always wrong", 0.0)):
        oracles = [Oracle([*prompt, *answer], size, p) for prompt, answer in answers]
        yield _row(name, target, oracles, answers, repeats)
    slow = [Slow(drafter, forwards=5)] * len(answers)
    yield _row("slow", target, slow, answers, repeats)


def _row(
    name: str,
    target: dm.Target,
    drafters: Sequence[Any],
    answers: Sequence[tuple[list[int], list[int]]],
    repeats: int,
) -> PolicyRow:
    widest = block_size(drafters[0]) or max(WIDTHS)
    costs, _ = pair_costs(target, drafters[0], widest, again=True)
    widths = [width for width in WIDTHS if width <= widest]
    over_plain, over_width = [], dict[int, list[float]]((width, []) for width in widths)
    rounds = drafted = 0
    settings: dict[str, Any] = {"logit_bias": never_ending(target)}
    for drafter, (prompt, answer) in zip(drafters, answers, strict=True):
        settings["max_tokens"] = len(answer)
        for _ in range(repeats):
            speeds: dict[int, float] = {}  # by fixed width; 1 is plain
            for width in (1, *widths):
                settings["block_size"] = width
                fixed = dm.generate(target, drafter if width > 1 else None, prompt, **settings)
                speeds[width] = fixed.stats.tokens_per_second
            settings |= {"block_size": None, "policy": dm.Policy(costs, widest)}
            free = dm.generate(target, drafter, prompt, **settings)
            speed = free.stats.tokens_per_second
            over_plain.append(speed / speeds[1])
            for width in widths:
                over_width[width].append(speed / speeds[width])
            rounds += free.stats.rounds
            drafted += free.stats.rounds - free.stats.widths.get(1, 0)
    medians = {1: median(over_plain), **{w: median(over_width[w]) for w in widths}}
    best = min(medians, key=lambda width: medians[width])
    return PolicyRow(
        drafter=name,
        over_plain=medians[1],
        over_best=medians[best],
        best_width=best,
        best_over_plain=medians[1] / medians[best],
        drafted_rounds=drafted / max(1, rounds),
        prompts=len(answers),
    )


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__, limit=1, repeats=3)
    target, drafter, prompts = experiment(options)
    answers = long_answers(target, prompts, LONG)
    for row in policy_rows(target, drafter, answers, options.repeats):
        best = "plain" if row.best_width == 1 else f"width {row.best_width}"
        print(
            f"{row.drafter:14}{row.over_plain:.2f}x plain, {row.over_best:.2f}x the best ({best}, "
            f"{row.best_over_plain:.2f}x plain), {row.drafted_rounds:.0%} of the rounds drafted",
            flush=True,
        )


if __name__ == "__main__":
    main()
