"""Shared by measuring scripts: options, and decoding with several methods in turns."""

from __future__ import annotations

import argparse
import io
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from random import sample
from typing import Any, TypeVar

import dflash_mlx as dm
from dflash_mlx.loading.registry import known_drafter

# Primitives that read their input in place.
VIEWS = {"AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze"}
VIEWS |= {"StopGradient", "Transpose", "Unflatten", "View"}
TURN = 16  # tokens that a method decodes before the next one's turn
Method = TypeVar("Method")


def options_of(doc: str, **defaults: int | str) -> argparse.Namespace:
    """Parse the command line: common options, and one per default.

    The drafter is the pair's own network, without lookup, unless --draft is given.
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


def in_turns(
    streams: Mapping[Method, Iterator[dm.Event]],
) -> dict[Method, tuple[dm.Stats, list[int]]]:
    """Decode with several methods in turns of `TURN` tokens; returns stats and tokens of each.

    A machine's speed changes from second to second, and turns spread this over all methods. The
    order changes in every lap, because wide steps leave other data in the CPU's caches. The time of
    a pipelined step counts for the method that started it.
    """
    import mlx.core as mx

    done: dict[Method, tuple[dm.Stats, list[int]]] = {}
    going, tokens = dict(streams), {method: list[int]() for method in streams}
    while going:
        for method, stream in sample([*going.items()], len(going)):
            end = len(tokens[method]) + TURN
            while len(tokens[method]) < end:
                event = next(stream, None)
                if event is None:
                    del going[method]
                    break
                tokens[method] += event.tokens
                done[method] = event.stats, tokens[method]
            clock = time.perf_counter()
            mx.synchronize()
            done[method][0].decode_seconds += time.perf_counter() - clock
    return done


def graph_nodes(*arrays: Any) -> Counter[str]:
    """How many nodes of each primitive the graphs of lazy MLX arrays have."""
    import mlx.core as mx

    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return Counter(re.findall(r'label ="(\w+)"', graph.getvalue()))
