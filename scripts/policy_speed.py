"""What the width policy makes of a pair, beside plain decoding and every width the drafter has.

    python scripts/policy_speed.py [--limit N] [--repeats N] [--seconds N] [--kept 0] [--stock-blas]

Prompts of the embedded suite, and free ones that its target knows nothing about. Each is
decoded in every way, side by side, `--repeats` times, and short answers as often as `--seconds`
allow. A way's time is the median of its shares of a turn, for a machine's pace moves from turn to
turn; a prompt's speed over plain decoding is the turns' median. A policy begins with what another
prompt of each class and the prompts so far have taught it, as `generate` does in every start but
the first, and as a chat; what a prompt teaches it, it does not know when the same one is decoded
again to be timed. With `--kept 0` it starts from nothing at each prompt.

Printed for each class of prompts: the policy's total time over the best fixed width's, and where 95
of 100 draws of as many turns have it; what chance makes of nothing, the widest width over itself,
which runs twice; rounds, the policy's and the widest width's; and the slowest prompt against plain
decoding. Costs are measured anew at the start; what the rounds corrected of them is printed at the
end.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from experiment import in_turns, options_of

import dflash_mlx as dm

WIDTHS, POLICY = (1, 2, 4, 8, 16), 0
AGAIN = -1  # the widest width, a second time
DRAWS = 500
FREE = """Tell me a story about a fox.
Summarize
What is the capital of France?
Write a haiku about the sea.
Explain recursion.
hi
How are you?
Who wrote Hamlet?
List three fruits.
Write a Python function that adds two numbers.
Translate 'good morning' to German.
Why is the sky blue?
Give me a recipe for pancakes.
Tell me a joke.
What is love?
Describe a cat.
How many days are in 6 weeks?
Write a poem.
What is your name?
Is 7 a prime number?
Explain gravity to a child.
Sort the numbers 3, 1, 2.
Tell me about dogs.
Once upon a time
What is 12 times 12?
Write an email to my boss.
Who are you?
Name the planets.
What should I cook tonight?
Plan a day in Rome.""".splitlines()


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__ or "", limit=5, repeats=3, seconds=5, kept=1, max_tokens=256)
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")

    from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
    from dflash_mlx.drafter.protocol import block_size

    target, drafter = dm.load(options.model, options.draft)
    widest = min(max(WIDTHS), block_size(drafter) or max(WIDTHS))
    costs = dm.Policy.of(target, drafter, again=True).costs
    kept = dm.Policy(costs, widest) if options.kept else None
    embedded = limit_per_category(embedded_prompts(), options.limit)
    if kept:
        for prompt in limit_per_category(embedded_prompts(), options.limit + 1):
            if prompt not in embedded:
                dm.generate(target, drafter, list(prompt.messages), policy=kept)
    asked = [(one.category, one.messages) for one in embedded]
    asked += [("free", [{"role": "user", "content": text}]) for text in FREE]
    classes: dict[str, list[Prompt]] = defaultdict(list)
    for category, messages in asked:
        prompt = Prompt(target, drafter, messages, options.max_tokens)
        taught = prompt.repeat(kept or dm.Policy(costs, widest), options)
        kept = taught if kept else None
        classes[category].append(prompt)
        if category == "free":
            print(prompt.line)
    print(
        "class        policy over best width (95%)   by chance   over plain"
        "   rounds, widest's    slowest over plain"
    )
    for category, prompts in classes.items():
        print(f"{category:12} {summary(prompts)}")
    if kept:
        print(*kept.describe(128), sep="\n")


class Prompt:
    """One prompt, decoded in every way again and again."""

    def __init__(self, target: Any, drafter: Any, messages: Any, max_tokens: int) -> None:
        from dflash_mlx.prompt import encode_prompt

        self._pair, self._ids = (target, drafter), encode_prompt(target, messages)
        self._text, self._max_tokens = str(messages[-1]["content"])[:40], max_tokens
        self._turns: list[list[float]] = []  # seconds of each way
        self.ways: list[int] = []
        self.stats: dict[int, dm.Stats] = {}  # of the last turn

    def repeat(self, policy: dm.Policy, options: Any) -> dm.Policy:
        """Decode in turns, each with the policy as it is; what it becomes in one of them."""
        end = perf_counter() + options.seconds
        while len(self._turns) < options.repeats or perf_counter() < end:
            taught = deepcopy(policy)
            self._turns.append(self._run(taught))
        return taught

    def _run(self, policy: dm.Policy) -> list[float]:
        """Decode once in every way, side by side; a lookup knows nothing of the other texts."""

        widths = [width for width in WIDTHS if width <= policy.widest]
        self.ways = [POLICY, *widths, AGAIN]
        streams = dict[int, Any]()
        for way in self.ways:
            width = widths[-1] if way == AGAIN else way
            how: Any = {"policy": policy} if way == POLICY else {"block_size": width}
            target, drafter = self._pair
            streams[way] = dm.stream_generate(
                target, drafter, self._ids, max_tokens=self._max_tokens, **how
            )
        done = in_turns(streams)
        self.stats = {way: done[way][0] for way in self.ways}
        return [self.stats[way].decode_seconds for way in self.ways]

    def seconds(self, turns: Any = slice(None)) -> np.ndarray:
        """Of each way, of all turns or of these."""
        taken = np.array(self._turns)[turns]
        whole = taken.sum(axis=1)
        return np.median(taken / whole[:, None], axis=0) * np.median(whole)

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Seconds of as many turns, drawn at random."""
        return self.seconds(rng.integers(len(self._turns), size=len(self._turns)))

    @property
    def over_plain(self) -> tuple[float, str]:
        """The policy's speed over plain decoding's, and what was asked."""
        plain, policy = self.ways.index(1), self.ways.index(POLICY)
        speed = median(turn[plain] / turn[policy] for turn in self._turns)
        return speed, f"{self._text!r}, {self.stats[POLICY].output_tokens} tokens"

    @property
    def line(self) -> str:
        """How it went, in a line."""
        stats, (speed, _) = self.stats[POLICY], self.over_plain
        counts = f"{stats.output_tokens:4} tokens {stats.rounds:4} rounds"
        return f"{self._text:42} {counts} {speed:5.2f}x plain, {len(self._turns)} turns"


def summary(prompts: list[Prompt]) -> str:
    """A class of prompts in a line; the best width is that of all turns, in every draw."""
    rng, ways = np.random.default_rng(0), prompts[0].ways
    seconds = dict(zip(ways, sum(prompt.seconds() for prompt in prompts), strict=True))
    widths = [way for way in ways if way not in (POLICY, AGAIN)]
    best = min(widths, key=seconds.__getitem__)
    draws = np.array([sum(prompt.drawn(rng) for prompt in prompts) for _ in range(DRAWS)])
    low, high = np.quantile(draws[:, 0] / draws[:, ways.index(best)], (0.025, 0.975))
    rounds = [sum(one.stats[way].rounds for one in prompts) for way in (POLICY, widths[-1])]
    slowest, text = min(prompt.over_plain for prompt in prompts)
    return (
        f"{seconds[POLICY] / seconds[best]:.3f} ({low:.3f} to {high:.3f}; width {best:>2})"
        f" {seconds[AGAIN] / seconds[widths[-1]]:10.3f} {seconds[1] / seconds[POLICY]:10.2f}x"
        f" {rounds[0]:8}, {rounds[1]:8} {slowest:14.2f}x ({text})"
    )


if __name__ == "__main__":
    main()
