"""Record what drafts of every width would have brought, at every place of some answers.

    python scripts/policy_traces.py [--out traces.json] [--model NAME] [--draft NAME] [--limit N]

Prompts of the embedded suite, and free ones. A trace is all that a width policy can see or cause,
so `policy_simulation.py` runs any policy on it exactly, at any costs and with no clock. It has, for
every token of an answer: the log-probability of the target's favourite where it was chosen, and how
many slots of a draft after it would have been right, for each width of `WIDTHS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from experiment import options_of
from policy_speed import FREE

import dflash_mlx as dm

WIDTHS = (2, 3, 4, 6, 8, 12, 16)  # rows, the anchor's included


def main() -> None:
    """Record and write."""
    options = options_of(__doc__ or "", out="traces.json", limit=8, max_tokens=256)
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")

    from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
    from dflash_mlx.prompt import encode_prompt

    target, drafter = dm.load(options.model, options.draft)
    embedded = limit_per_category(embedded_prompts(), options.limit)
    asked: list[tuple[str, Any]] = [(one.category, one.messages) for one in embedded]
    asked += [("free", [{"role": "user", "content": text}]) for text in FREE]
    traces = []
    for category, messages in asked:
        prompt = encode_prompt(target, messages)
        answer = dm.generate(target, None, prompt, max_tokens=options.max_tokens).tokens
        certainty, right = zip(*places(target, drafter, prompt, answer), strict=True)
        text = str(messages[-1]["content"])
        traces.append({"class": category, "text": text, "certainty": certainty, "right": right})
        print(f"{category:12} {len(answer):4} tokens  {text[:60]}", flush=True)
        Path(options.out).write_text(json.dumps(traces))


def places(
    target: dm.Target, drafter: Any, prompt: list[int], answer: list[int]
) -> Iterator[tuple[float, list[int]]]:
    """For each token of an answer its certainty, and the right slots of each draft after it."""
    import mlx.core as mx

    from dflash_mlx.sampling import Sampler

    text = [*prompt, *answer]
    logits = target.model(mx.array([text[:-1]]))[0, len(prompt) - 1 :].astype(mx.float32)
    certainties: Any = (logits.max(axis=-1) - mx.logsumexp(logits, axis=-1)).tolist()
    session, drafting = target.start(drafter.tap_layers), drafter.start(target, Sampler())
    taps = mx.concatenate([features for _, features in session.prefill(text[:-1])], axis=1)
    drafting.extend(taps[:, : len(prompt)])
    for place, certainty in enumerate(certainties, start=len(prompt)):
        rest = text[place + 1 :]
        yield certainty, [right(drafting.propose(text[place], width), rest) for width in WIDTHS]
        drafting.extend(taps[:, place : place + 1])


def right(proposal: Any, rest: Sequence[int]) -> int:
    """How many drafted tokens are what the text went on with."""
    import mlx.core as mx

    drafted: Any = mx.array(proposal.tokens).tolist()
    pairs = zip(drafted[1:], rest, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


if __name__ == "__main__":
    main()
