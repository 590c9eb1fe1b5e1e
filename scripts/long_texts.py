"""Time whole answers after long prompts: mlx-lm, ours plain, and drafts that pay or never do.

    python scripts/long_texts.py [--model tiny] [--lengths 1000,4000,8000] [--max-tokens 128]

All sides of a length take turns in one process. The drafter that never pays is the model's own with
its features mixed up: each draft costs what it costs, and is wrong. Prints seconds in all, to the
first token, and of a step, and the total over mlx-lm's.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any


def mlx_lm_seconds(target: Any, prompt: list[int], max_tokens: int) -> tuple[float, float, float]:
    """Seconds in all, to the first token and of a step of mlx-lm's own `generate_step`."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    start, times = time.perf_counter(), list[float]()
    for _ in generate_step(mx.array(prompt), target.model, max_tokens=max_tokens):
        times.append(time.perf_counter() - start)
    return times[-1], times[0], (times[-1] - times[0]) / (len(times) - 1)


def seconds(
    target: Any, drafter: Any, prompt: list[int], max_tokens: int
) -> tuple[float, float, float]:
    """The same of ours, with the default policy."""
    import dflash_mlx as dm

    policy = None if drafter is None else dm.DraftPolicy.of(target, drafter)
    start = time.perf_counter()
    result = dm.generate(target, drafter, prompt, max_tokens=max_tokens, policy=policy)
    total, stats = time.perf_counter() - start, result.stats
    return total, stats.first_token_seconds, stats.decode_seconds / max(1, stats.rounds)


def main() -> None:
    """See the module's docstring."""
    import dflash_mlx as dm

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--lengths", default="1000,4000,8000")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dm.use_fast_blas()
    import mlx.core as mx

    from dflash_mlx.bench.datasets import embedded_prompts

    target, drafter = dm.load(args.model, draft=args.model)
    _, mixed_up = dm.load(args.model, draft=args.model)
    target.context_length, target.tokenizer.eos_token_ids = (
        2**20,
        set(),
    )  # every answer has as many tokens
    mixed_up.fc.weight = mixed_up.fc.weight[:, ::-1]
    mx.eval(mixed_up.fc.weight)
    text = "".join(f"{one.messages[-1]['content']} {one.answer}\n" for one in embedded_prompts())
    ids = target.tokenizer.encode(text * 3)
    for length in map(int, args.lengths.split(",")):
        prompt = ids[:length]
        sides = {
            "mlx-lm": partial(mlx_lm_seconds, target),
            "plain": partial(seconds, target, None),
            "drafted": partial(seconds, target, drafter),
            "never pays": partial(seconds, target, mixed_up),
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, side in sides.items():
                found[name].append(side(prompt, args.max_tokens))
        base = median(run[0] for run in found["mlx-lm"])
        for name, runs in found.items():
            total, first, step = (median(values) for values in zip(*runs, strict=True))
            print(
                f"{length:6} tokens  {name:10}  {total:6.2f} s, first token {first:6.2f} s, "
                f"a step {1e3 * step:6.1f} ms, {total / base:.2f} of mlx-lm's",
                flush=True,
            )


if __name__ == "__main__":
    main()
