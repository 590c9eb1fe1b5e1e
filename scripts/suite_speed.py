"""Fixed widths, the policy and plain decoding on the papers' suites, in turns.

    python scripts/suite_speed.py --model smollm2 [--data DIR] [--suites NAME,NAME] [--limit N]
        [--widths 2,4,8] [--max-tokens N] [--temperature T] [--stock-blas]

The prompts are spread evenly over a suite. One policy decodes all of them, and learns as it does
for somebody who chats; its costs are those that are kept, measured now where there are none.
Prints tokens a round and the speed over plain decoding, the policy's share of the best of all, and
whether every text was the plain one. `--data` is as in `dflash-mlx bench`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiment import options_of

import dflash_mlx as dm

SUITES = "gsm8k,humaneval,mbpp,mt-bench,math500"


def main() -> None:
    """Measure and print, suite by suite."""
    options = options_of(
        __doc__ or "",
        data="",
        suites=SUITES,
        limit=4,
        max_tokens=96,
        temperature=0.0,
        widths="2,4,8",
    )
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")

    from dflash_mlx.bench.suites import suite_prompts
    from dflash_mlx.loading.hub import Hub

    target, drafter = dm.load(options.model, options.draft)
    asked = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": 0}
    widths = [int(width) for width in options.widths.split(",")]
    policy = dm.Policy.of(target, drafter)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (None, {}),
        **{f"{width} rows": (drafter, {"block_size": width}) for width in widths},
        "policy": (drafter, {"policy": policy}),
    }
    dm.generate(target, drafter, "warm up", max_tokens=8)
    folder = Path(options.data) if options.data else None
    for suite in options.suites.split(","):
        prompts = suite_prompts(suite, Hub(), folder)
        prompts = prompts[:: max(1, len(prompts) // options.limit)][: options.limit]
        tokens, rounds, seconds = (dict.fromkeys(ways, 0.0) for _ in range(3))
        same = 0
        for number, prompt in enumerate(prompts):
            texts = []
            for way in sorted(ways, reverse=bool(number % 2)):  # nobody is always the first
                with_what, settings = ways[way]
                messages = list(prompt.messages)
                result = dm.generate(target, with_what, messages, **asked, **settings)
                tokens[way] += result.stats.round_tokens
                rounds[way] += result.stats.rounds
                seconds[way] += result.stats.decode_seconds
                texts.append(result.tokens)
            same += all(text == texts[0] for text in texts)
        speed = {way: tokens[way] / seconds[way] for way in ways}
        best = max(speed[way] for way in ways if way != "policy")
        said = ", ".join(
            f"{way} {tokens[way] / rounds[way]:.2f} tokens a round "
            f"{speed[way] / speed['plain']:.2f}x"
            for way in ways
            if way != "plain"
        )
        print(f"{suite:12} {said}; the policy has {speed['policy'] / best:.3f} of the best speed")
        print(f"{'':12} {same} of {len(prompts)} texts the plain ones", flush=True)
    print(*policy.describe(256), sep="\n")


if __name__ == "__main__":
    main()
