"""Time whole answers after long prompts: mlx-lm, ours plain, and drafts that pay or never do.

    python scripts/long_texts.py [--model tiny] [--lengths 1000,4000,8000] [--max-tokens 128]

All sides of a length take turns in one process. "pays" computes the network's drafts and verifies
what follows in the text instead, for the embedded pair was trained on short ones. The drafter that
never pays is the model's own with its features mixed up: each draft costs what it costs, and is
wrong. "tapped before" is the same, but reads the layer before the target's last one instead of
that, as most published drafters do. Prints seconds in all, to the first token, of the first step,
in which the drafter reads the prompt, and of a later one, and the total over mlx-lm's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

Seconds = tuple[float, float, float, float]  # in all, to the first token, of the first step, later


class Knowing:
    """Drafts as a network does, at its cost, but what follows in a known text."""

    def __init__(self, network: Any) -> None:
        self.network, self.tap_layers, self.block_size = network, network.tap_layers, 16
        self.text: list[int] = []

    def start(self, target: Any, sampler: Any) -> Any:
        """Begin one request."""
        import mlx.core as mx

        import dflash_mlx as dm

        session = self.network.start(target, sampler)
        own = session.propose

        def propose(anchor: int, width: int) -> Any:
            mx.async_eval(own(anchor, width).tokens if width > 1 else ())
            after = session.position + 1
            return dm.Proposal([anchor, *self.text[after : after + width - 1]])

        session.propose = propose
        return session


def mlx_lm_seconds(target: Any, prompt: list[int], max_tokens: int) -> Seconds:
    """The seconds of mlx-lm's own `generate_step`."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    start, times = time.perf_counter(), list[float]()
    for _ in generate_step(mx.array(prompt), target.model, max_tokens=max_tokens):
        times.append(time.perf_counter() - start)
    later = (times[-1] - times[1]) / (len(times) - 2)
    return times[-1], times[0], times[1] - times[0], later


def seconds(target: Any, drafter: Any, prompt: list[int], max_tokens: int) -> Seconds:
    """The same of ours, with a new policy."""
    import dflash_mlx as dm

    policy = None if drafter is None else dm.DraftPolicy.of(target, drafter)
    start = time.perf_counter()
    result = dm.generate(target, drafter, prompt, max_tokens=max_tokens, policy=policy)
    total, stats = time.perf_counter() - start, result.stats
    first = stats.first_round_seconds
    later = (stats.decode_seconds - first) / max(1, stats.rounds - 1)
    return total, stats.first_token_seconds, first, later


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
    target.context_length = 2**20
    target.tokenizer.eos_token_ids = set()  # every answer has as many tokens
    mixed_up, before = (dm.load(args.model, draft=args.model)[1] for _ in range(2))
    for wrong in (mixed_up, before):
        wrong.fc.weight = wrong.fc.weight[:, ::-1]
        mx.eval(wrong.fc.weight)
    *taps, last = before.config.target_layer_ids
    before.config = replace(
        before.config, target_layer_ids=(*taps, min(last, target.num_layers - 2))
    )
    text = "".join(f"{one.messages[-1]['content']} {one.answer}\n" for one in embedded_prompts())
    ids = target.tokenizer.encode(text * 3)
    for length in map(int, args.lengths.split(",")):
        prompt, knowing = ids[:length], Knowing(drafter)
        plain = dm.generate(target, None, prompt, max_tokens=args.max_tokens)
        knowing.text = [*prompt, *plain.tokens]
        sides = {
            "mlx-lm": partial(mlx_lm_seconds, target),
            "plain": partial(seconds, target, None),
            "pays": partial(seconds, target, knowing),
            "never pays": partial(seconds, target, mixed_up),
            "tapped before": partial(seconds, target, before),
        }
        found: dict[str, list[Seconds]] = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, side in sides.items():
                found[name].append(side(prompt, args.max_tokens))
        base = median(run[0] for run in found["mlx-lm"])
        for name, runs in found.items():
            total, token, step, later = (median(values) for values in zip(*runs, strict=True))
            print(
                f"{length:6} tokens  {name:13}  {total:6.2f} s, first token {token:6.2f} s, first "
                f"step {step:5.2f} s, a step {1e3 * later:6.1f} ms, {total / base:.2f} of mlx-lm's",
                flush=True,
            )


if __name__ == "__main__":
    main()
