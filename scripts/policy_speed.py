"""What the width policy makes of a pair, beside plain decoding and every width the drafter has.

    python scripts/policy_speed.py [--limit N] [--repeats N] [--seconds N] [--kept 0] [--stock-blas]

Prompts of the embedded suite, and free ones that its target knows nothing about. Each is
decoded in every way, side by side, `--repeats` times, and short answers as often as `--seconds`
allow. Times are medians of all turns; a prompt's speed over plain decoding is the turns' median. A
policy begins with what another prompt of each class and the prompts so far have taught it, as
`generate` does in every start but the first, and as a chat; what a prompt teaches it, it does not
know when the same one is decoded again to be timed. With `--kept 0` it starts from nothing at each
prompt. Printed for each class of prompts: the policy's total time over the best fixed width's, and
its slowest prompt against plain decoding. Costs are measured anew at the start; what the rounds
corrected of them is printed at the end.
"""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

from experiment import in_turns, options_of

import dflash_mlx as dm

WIDTHS, POLICY = (1, 2, 4, 8, 16), 0
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
    times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    slowest: dict[str, tuple[float, str]] = {}
    for category, messages in asked:
        prompt = Prompt(target, drafter, messages, options.max_tokens)
        taught = prompt.repeat(kept or dm.Policy(costs, widest), options)
        kept = taught if kept else None
        for way, seconds in prompt.seconds.items():
            times[category][way] += seconds
        slowest[category] = min(slowest.get(category, (float("inf"), "")), prompt.over_plain)
        if category == "free":
            print(prompt.line)
    print("class         policy over the best width   over plain   slowest prompt over plain")
    for category, by_way in times.items():
        best = min((way for way in by_way if way != POLICY), key=by_way.__getitem__)
        low, text = slowest[category]
        print(
            f"{category:13} {by_way[POLICY] / by_way[best]:6.3f} (width {best:>2}) "
            f"{by_way[1] / by_way[POLICY]:18.2f}x {low:8.2f}x ({text})"
        )
    if kept:
        print(*kept.describe(128), sep="\n")


class Prompt:
    """One prompt, decoded in every way again and again."""

    def __init__(self, target: Any, drafter: Any, messages: Any, max_tokens: int) -> None:
        from dflash_mlx.prompt import encode_prompt

        self._pair, self._ids = (target, drafter), encode_prompt(target, messages)
        self._text, self._max_tokens = str(messages[-1]["content"])[:40], max_tokens
        self._turns: list[dict[int, float]] = []  # seconds of each way
        self._stats: Any = None

    def repeat(self, policy: dm.Policy, options: Any) -> dm.Policy:
        """Decode in turns, each with the policy as it is; what it becomes in one of them."""
        end = perf_counter() + options.seconds
        while len(self._turns) < options.repeats or perf_counter() < end:
            taught = deepcopy(policy)
            self._turns.append(self._run(taught))
        return taught

    def _run(self, policy: dm.Policy) -> dict[int, float]:
        """Decode once in every way, side by side."""
        streams = dict[int, Any]()
        for way in (POLICY, *(width for width in WIDTHS if width <= policy.widest)):
            how: Any = {"policy": policy} if way == POLICY else {"block_size": way}
            streams[way] = dm.stream_generate(
                *self._pair, self._ids, max_tokens=self._max_tokens, **how
            )
        done = in_turns(streams)
        self._stats = done[POLICY][0]
        return {way: stats.decode_seconds for way, (stats, _) in done.items()}

    @property
    def seconds(self) -> dict[int, float]:
        """Of each way, of all turns the median."""
        return {way: median(turn[way] for turn in self._turns) for way in self._turns[0]}

    @property
    def over_plain(self) -> tuple[float, str]:
        """The policy's speed over plain decoding's, and what was asked."""
        speed = median(turn[1] / turn[POLICY] for turn in self._turns)
        return speed, f"{self._text!r}, {self._stats.output_tokens} tokens"

    @property
    def line(self) -> str:
        """How it went, in a line."""
        stats, (speed, _) = self._stats, self.over_plain
        counts = f"{stats.output_tokens:4} tokens {stats.rounds:4} rounds"
        return f"{self._text:42} {counts} {speed:5.2f}x plain"


if __name__ == "__main__":
    main()
