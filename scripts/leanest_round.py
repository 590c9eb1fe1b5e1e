"""Our rounds beside the leanest ones: the same two forwards written by hand, and nothing else.

    python scripts/leanest_round.py [--rows 1,8,16] [--context 100,1000] [--policy]
    python scripts/leanest_round.py --counts

Both sides (`stream_generate` and `dflash_mlx/bench/leanest.py`) answer the same prompts with the
same weights, a round each in turn, and must say the same. A round ends when the device is idle;
printed are the medians by the clock, and the ratio of pairs, of these and of the whole process's
CPU time. The clock alone sees that ours drafts while the host goes on, so it needs a quiet machine,
and a second core or a GPU: with `taskset -c 1`, MLX's thread and the host's take turns on one, and
how often they do so weighs as much as what is compared. `--counts` needs neither: what both ask of
the device, counted in the graphs, and how many Python functions are called for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from typing import Any, TypeVar

import dflash_mlx as dm
from dflash_mlx.loading.registry import known_drafter

T = TypeVar("T")
Seconds = tuple[float, float]  # by the clock, and the process's CPU time
WARM_UP, ROUNDS = 2, 10  # of each request: rounds that do not count, and those that do


def timed(work: Callable[[], T]) -> tuple[T, Seconds]:
    """What comes of it, and what it takes until the device is idle."""
    import mlx.core as mx

    clock, cpu = time.perf_counter(), time.process_time()
    result = work()
    mx.synchronize()
    return result, (time.perf_counter() - clock, time.process_time() - cpu)


def paired(
    target: dm.Target, drafter: dm.DFlash, prompt: list[int], rows: int, first: bool, **ours: Any
) -> Iterator[tuple[Seconds, Seconds]]:
    """Seconds of our rounds and of the leanest ones on one prompt, in turns."""
    from dflash_mlx.bench.leanest import Leanest

    lean = Leanest(target, drafter)
    network = drafter if rows > 1 or "policy" in ours else None  # one row is plain decoding
    events = dm.stream_generate(target, network, prompt, max_tokens=10_000, **ours)
    assert next(events).tokens == [lean.prefill(prompt)]
    for number in range(WARM_UP + ROUNDS):
        if first:
            event, ours = timed(lambda: next(events, None))
        tokens, theirs = timed(lambda: lean.round(rows))
        if not first:
            event, ours = timed(lambda: next(events, None))
        if event is None or event.finish_reason is not None:
            return
        assert event.tokens == tokens, "the two sides do not say the same"
        if number >= WARM_UP:
            yield ours, theirs


def count(target: dm.Target, drafter: dm.DFlash, prompts: list[list[int]], rows: int) -> None:
    """Print what a round of both sides asks of the device, of the first prompt long enough."""
    from dflash_mlx.bench.counts import count_leanest, count_round

    of = drafter if rows > 1 else None
    found = ((prompt, count_round(target, of, prompt, rows)) for prompt in prompts)
    prompt, ours = next((prompt, ours) for prompt, ours in found if ours is not None)
    sides = {"ours": ours, "leanest": count_leanest(target, drafter, prompt, rows)}
    for name, side in sides.items():
        graph = side.graph
        print(
            f"{len(prompt):5} tokens, {rows:2} rows, {name:7}: {graph.nodes:5} nodes, "
            f"{graph.launches:4} kernels, {graph.copies:3} copies, {graph.copied_bytes:9,} bytes, "
            f"{side.passes} passes, {side.waits} waits, {side.calls:3} calls"
        )


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="tiny")
    options.add_argument("--draft")
    options.add_argument("--rows", default="1,8,16")
    options.add_argument("--context", default="100,1000")
    options.add_argument("--rounds", type=int, default=120, help="that count, of each kind")
    options.add_argument("--policy", action="store_true", help="ours: a policy that knows no cost")
    options.add_argument("--stock-blas", action="store_true", help="keep MLX's own BLAS on Linux")
    options.add_argument("--counts", action="store_true", help="count, and time nothing")
    asked = options.parse_args()
    print(f"BLAS: {dm.use_fast_blas(stock=asked.stock_blas).name}")

    from dflash_mlx.bench.datasets import embedded_prompts
    from dflash_mlx.bench.leanest import why_not
    from dflash_mlx.policy.costs import Costs
    from dflash_mlx.prompt import encode_prompt

    target, drafter = dm.load(asked.model, asked.draft or known_drafter(asked.model))
    if (why := why_not(target, drafter)) is not None:
        raise SystemExit(f"No leanest round of this pair: {why}.")
    text = [token for one in embedded_prompts() for token in encode_prompt(target, one.messages)]
    if asked.counts:
        for context in map(int, asked.context.split(",")):
            for rows in map(int, asked.rows.split(",")):
                prompts = [text[at : at + context] for at in range(0, len(text) - context, context)]
                count(target, drafter, prompts, rows)
        return
    print("context  rows  ours ms  leanest ms  ratio  in CPU time")
    for context in map(int, asked.context.split(",")):
        for rows in map(int, asked.rows.split(",")):
            ways: dict[str, Any] = {"block_size": rows}
            if asked.policy:  # drafts cost nothing, or all there is: every round is of `rows`
                draft = 0.0 if rows > 1 else 1e3
                costs = Costs({64: {1: 1.0}}, {64: {1: 0.0, 2: draft}})
                ways = {"policy": dm.Policy(costs, max(2, rows))}
            pairs: list[tuple[Seconds, Seconds]] = []
            for number in cycle(range(len(text) // context)):
                prompt = text[number * context :][:context]
                pairs += paired(target, drafter, prompt, rows, bool(number % 2), **ways)
                if len(pairs) >= asked.rounds:
                    break
            sides = zip(*pairs, strict=True)
            ours, theirs = (1e3 * median(wall for wall, _ in side) for side in sides)
            ratio, cpu = (median(a[by] / b[by] for a, b in pairs) for by in (0, 1))
            times = f"{ours:7.2f}  {theirs:10.2f}  {ratio:5.3f}  {cpu:11.3f}"
            print(f"{context:7}  {rows:4}  {times}", flush=True)


if __name__ == "__main__":
    main()
