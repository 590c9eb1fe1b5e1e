"""The time to the first token beside `mlx_lm.stream_generate` on the same prompts, in turns.

    taskset -c 1 python scripts/first_token.py [--tokens 50,500,3000] [--repeats 8]

CPU seconds of the process until the first token is handed over; the embedded pair's own drafter is
there, and what it has begun by then counts. A context of 3,000 tokens is beyond what the pair was
made for, which changes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator
from statistics import median
from typing import Any

import dflash_mlx as dm


def first(events: Generator[Any, None, None]) -> float:
    """CPU seconds until the first event."""
    import mlx.core as mx

    clock = time.process_time()
    next(events)
    seconds = time.process_time() - clock
    events.close()
    mx.synchronize()
    return seconds


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokens", default="50,500,3000")
    options.add_argument("--repeats", type=int, default=8)
    asked = options.parse_args()
    print(f"BLAS: {dm.use_fast_blas().name}")
    from mlx_lm import stream_generate

    target, drafter = dm.load("tiny")
    target.context_length = 1 << 20
    print("tokens  ours ms  mlx-lm ms  ratio")
    for tokens in map(int, asked.tokens.split(",")):
        prompt = [(i * 7919 + 13) % 1000 + 20 for i in range(tokens)]
        pairs = []
        for _ in range(asked.repeats + 1):
            ours: Any = dm.stream_generate(target, drafter, prompt, max_tokens=2)
            theirs = stream_generate(target.model, target.tokenizer, prompt, max_tokens=2)
            pairs.append((first(ours), first(theirs)))
        mine, other = (1e3 * median(side) for side in zip(*pairs[1:], strict=True))
        ratio = median(a / b for a, b in pairs[1:])
        print(f"{tokens:6}  {mine:7.1f}  {other:9.1f}  {ratio:5.3f}", flush=True)


if __name__ == "__main__":
    main()
