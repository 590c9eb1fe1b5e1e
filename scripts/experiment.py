"""What the experiments share: their options, a pair, and the embedded suite's prompts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from random import sample
from typing import Any, TypeVar

import dflash_mlx as dm
from dflash_mlx.loading.registry import known_drafter

TURN = 16  # tokens that a text goes on by before it is another's turn
Way = TypeVar("Way")
Item = TypeVar("Item")


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


def spread(items: Sequence[Item], count: int, first: int = 0) -> Sequence[Item]:
    """So many of these, spread evenly from the first one on."""
    return items[first :: max(1, len(items) // count)][:count]


def in_turns(streams: Mapping[Way, Iterator[dm.Event]]) -> dict[Way, tuple[dm.Stats, list[int]]]:
    """Decode in several ways side by side, `TURN` tokens of each in turn: its stats and tokens.

    A machine's pace changes from one second to the next: here it does so for all ways alike. Each
    lap has another order, for whoever comes after wide rounds finds other caches. Stats count the
    time of a way's own rounds, the one included that a turn's last round has begun.
    """
    import mlx.core as mx

    done: dict[Way, tuple[dm.Stats, list[int]]] = {}
    going, tokens = dict(streams), {way: list[int]() for way in streams}
    while going:
        for way, stream in sample([*going.items()], len(going)):
            end = len(tokens[way]) + TURN
            while len(tokens[way]) < end:
                event = next(stream, None)
                if event is None:
                    del going[way]
                    break
                tokens[way] += event.tokens
                done[way] = event.stats, tokens[way]
            clock = time.perf_counter()
            mx.synchronize()
            done[way][0].decode_seconds += time.perf_counter() - clock
    return done
