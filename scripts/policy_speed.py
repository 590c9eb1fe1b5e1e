"""How fast the width policy is on the embedded suite, beside whole blocks and blocks of 6.

    python scripts/policy_speed.py [--stock-blas] [--limit N] [--repeats N]

Every prompt is decoded plainly, with one policy that is kept from prompt to prompt, and with fixed
blocks, in turns; printed are medians of the speed over plain decoding. Costs are measured anew.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median

import dflash_mlx as dm


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The width policy on the embedded suite.")
    parser.add_argument("--stock-blas", action="store_true", help="keep MLX's own BLAS on Linux")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each category")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    blas = dm.use_fast_blas(stock=options.stock_blas)

    from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
    from dflash_mlx.prompt import encode_prompt

    target, drafter = dm.load("tiny")
    policy = dm.Policy.of(target, drafter, again=True)
    ways = {"policy": {"policy": policy}, "blocks of 16": {}, "blocks of 6": {"block_size": 6}}
    speedups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for prompt in limit_per_category(embedded_prompts(), options.limit):
        ids = encode_prompt(target, prompt.messages)
        for _ in range(options.repeats):
            plain = dm.generate(target, None, ids).stats.tokens_per_second
            for way, settings in ways.items():
                speed = dm.generate(target, drafter, ids, **settings).stats.tokens_per_second
                for category in (prompt.category, "all"):
                    speedups[category, way].append(speed / plain)
    print(f"speed over plain decoding, BLAS: {blas.name}")
    for category in dict.fromkeys(category for category, _ in speedups):
        figures = (f"{way} {median(speedups[category, way]):.2f}x" for way in ways)
        print(f"{category:12}" + ", ".join(figures))


if __name__ == "__main__":
    main()
