"""What lookup beside a network costs where nothing repeats: the network alone against both.

    python scripts/lookup_cost.py [--limit N] [--repeats N] [--stock-blas]

Every prompt is decoded with one policy each, in turns; the quickest time of each way counts.
"""

from __future__ import annotations

from experiment import options_of

import dflash_mlx as dm


def main() -> None:
    """Measure and print."""
    options = options_of(__doc__ or "", limit=3, repeats=3)
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")

    from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
    from dflash_mlx.prompt import encode_prompt

    alone, both = dm.load(options.model, options.draft), dm.load(options.model)
    costs = dm.Policy.of(*alone, again=True).costs
    ways = {"alone": (alone, dm.Policy(costs, 16)), "both": (both, dm.Policy(costs, 16))}
    total, same = dict.fromkeys(ways, 0.0), True
    for prompt in limit_per_category(embedded_prompts(), options.limit):
        ids, quickest, texts = encode_prompt(alone[0], prompt.messages), {}, []
        for _ in range(options.repeats):
            for way, (pair, policy) in ways.items():
                result = dm.generate(*pair, ids, policy=policy)
                seconds = result.stats.decode_seconds
                quickest[way] = min(seconds, quickest.get(way, seconds))
                texts.append(result.tokens)
        same &= all(text == texts[0] for text in texts)
        for way, seconds in quickest.items():
            total[way] += seconds
    share = total["alone"] / total["both"]
    print(f"with lookup: {share:.3f} of the network's speed alone, texts identical: {same}")


if __name__ == "__main__":
    main()
