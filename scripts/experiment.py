"""What the experiments share: their options, a pair, and the embedded suite's prompts."""

from __future__ import annotations

import argparse
from typing import Any

import dflash_mlx as dm
from dflash_mlx.loading.registry import known_drafter


def options_of(doc: str, **defaults: int | str) -> argparse.Namespace:
    """The options of the command line: those of every experiment, and others by default.

    What drafts is the pair's own network, alone unless --draft says otherwise.
    """
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--model", default="tiny")
    options.add_argument("--draft")
    options.add_argument("--stock-blas", action="store_true", help="keep MLX's own BLAS on Linux")
    for name, default in defaults.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    found = options.parse_args()
    found.draft = found.draft or known_drafter(found.model)
    return found


def experiment(options: argparse.Namespace) -> tuple[dm.Target, Any, list[list[int]]]:
    """The pair, and `limit` prompts of each category as token ids."""
    print(f"BLAS: {dm.use_fast_blas(stock=options.stock_blas).name}")
    from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
    from dflash_mlx.prompt import encode_prompt

    target, drafter = dm.load(options.model, options.draft)
    prompts = limit_per_category(embedded_prompts(), options.limit)
    return target, drafter, [encode_prompt(target, prompt.messages) for prompt in prompts]
