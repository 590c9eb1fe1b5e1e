"""Is the policy as good as it has to be? Times it beside plain decoding and fixed draft lengths.

    python scripts/policy_bounds.py [--limit N] [--repeats N] [--free N]

Runs itself for three cases, and prints a table and the bounds for each: the embedded pair with the
fast BLAS and with MLX's own, and SmolLM2. All ways to decode a prompt take turns, 16 tokens at a
time, because a machine's speed drifts. The policy answers one other prompt of each class first. It
keeps what it learns from prompt to prompt. Times of a class are sums over its prompts, of the
median of each prompt's repeats. Run it on a quiet machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from copy import deepcopy
from statistics import median
from typing import Any

from experiment import in_turns, options_of

import dflash_mlx as dm

LENGTHS, POLICY, PLAIN = (1, 2, 4, 8, 16), 0, 1
CASES = (["--model", "tiny"], ["--model", "tiny", "--stock-blas"], ["--model", "smollm2"])
OVER_BEST, OVER_PLAIN, SLOWEST, FREE_OVER_PLAIN = 1.05, 0.97, 0.7, 1.3
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
    """Run one case if a model is named, else all of them."""
    options = options_of(__doc__ or "", limit=3, repeats=3, free=len(FREE), max_tokens=160)
    if not any(argument.startswith("--model") for argument in sys.argv):
        for case in CASES:
            print(f"\n{' '.join(case)}", flush=True)
            subprocess.run([sys.executable, __file__, *case, *sys.argv[1:]], check=False)
        return
    dm.use_fast_blas(stock=options.stock_blas)
    target, drafter = dm.load(options.model, options.draft)
    policy = dm.DraftPolicy.of(target, drafter)
    classes, first = _prompts(options)
    for messages in first:
        dm.generate(target, drafter, messages, policy=policy, max_tokens=options.max_tokens)
    ways = [POLICY, *(length for length in LENGTHS if length <= policy.block_size)]
    print("class         policy/best  best    over plain  slowest prompt")
    broken = []
    for name, prompts in classes.items():
        took: list[dict[int, float]] = []
        for messages in prompts:
            runs = []
            for _ in range(options.repeats):
                taught = deepcopy(policy)  # a prompt does not teach its own repeats
                runs.append(_run(target, drafter, messages, taught, ways, options.max_tokens))
            policy = taught
            took.append({way: median(run[way] for run in runs) for way in ways})
        total = {way: sum(one[way] for one in took) for way in ways}
        best = min(ways[1:], key=total.__getitem__)
        over_best, over_plain = total[POLICY] / total[best], total[PLAIN] / total[POLICY]
        slowest = min(one[PLAIN] / one[POLICY] for one in took)
        print(f"{name:12} {over_best:12.3f} {best:5} {over_plain:12.2f}x {slowest:14.2f}x")
        least = FREE_OVER_PLAIN if name == "free" and options.model == "tiny" else OVER_PLAIN
        if over_best > OVER_BEST or over_plain < least or slowest < SLOWEST:
            broken.append(name)
    print("\n".join(policy.describe()))
    print(f"out of bounds: {', '.join(broken)}" if broken else "all within bounds")


def _prompts(options: Any) -> tuple[dict[str, list[Any]], list[Any]]:
    """Chat messages by class, and one prompt more of each for the policy to learn from."""
    from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category

    classes: dict[str, list[Any]] = defaultdict(list)
    for prompt in limit_per_category(embedded_prompts(), options.limit + 1):
        classes[prompt.category].append(list(prompt.messages))
    first = [prompts.pop() for prompts in classes.values()]
    classes["free"] = [[{"role": "user", "content": text}] for text in FREE[: options.free]]
    return classes, first


def _run(
    target: Any, drafter: Any, messages: Any, policy: Any, ways: list[int], tokens: int
) -> dict[int, float]:
    """Seconds of one answer in every way, in turns."""
    settings: dict[int, Any] = {way: {"block_size": way} for way in ways}
    settings[POLICY] = {"policy": policy}
    streams = {
        way: dm.stream_generate(target, drafter, messages, max_tokens=tokens, **settings[way])
        for way in ways
    }
    done = in_turns(streams)
    return {way: max(1e-6, done[way][0].decode_seconds) for way in ways}


if __name__ == "__main__":
    main()
