"""Compares ranks on this machine with one process: every tiny family, and the embedded pair.

    python scripts/cluster_check.py 2 4              all families and the pair, over 2 and 4 ranks
    python scripts/cluster_check.py 4 kimi_k25       one family over 4 ranks; `pair` is the pair
    python scripts/cluster_check.py --pipeline 2 4   by layers instead of by heads

Of each: texts at T = 0 and 0.8, of chains and of trees; three requests that join one after the
other, and a fourth that is cancelled; a message a round, and one sum a message; what drafters are
told of the target's layers; and caches that have the same bits on just those ranks that hold the
same heads, or, in a pipeline, those of one machine. Over 4 ranks, families get twice the heads
where 4 does not divide them. Of the pair, all sums of 256 tokens are counted, drafted and plain.

The tests do a part of it. Ranks that wait keep a core busy, so 4 of them on 2 cores take a minute a
family. Exit code 1 for anything that is not as on one machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clusters import run_ranks
from families import FAMILIES

SECONDS = 1800
TOKENS = 256  # for which sums are counted
PAIR, PIPELINE = "pair", "--pipeline"
CLOSE = 1e-4  # of sums in another order


def main(arguments: list[str]) -> int:
    by = [PIPELINE] if PIPELINE in arguments else []
    sizes = [int(one) for one in arguments if one.isdecimal()]
    names = [one for one in arguments if not one.isdecimal() and one not in by]
    good = True
    for size, name in product(sizes or [2], names or [*FAMILIES, *([] if by else [PAIR])]):
        if name != PAIR:
            good &= _show(size, _run("cluster_families.py", size, *by, name))
            continue
        good &= _show(size, _run("cluster_pair.py", size, "texts", "turns", "together"))
        if size == 2:
            good &= _show(size, _run("cluster_pair.py", size, f"sums={TOKENS}"))
    return 0 if good else 1


def _run(program: str, size: int, *arguments: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(program, size, Path(folder), *arguments, seconds=SECONDS)


def _show(size: int, found: list[dict[str, Any]]) -> bool:
    for one in found:
        print("ok  " if _good(one) else "MISS", size, json.dumps(one), flush=True)
    return all(map(_good, found))


def _good(one: dict[str, Any]) -> bool:
    """Whether all is as on one machine, a message a round."""
    if "texts" in one:
        messages = one["rounds"] == one["messages"] and one["sums a message"] == 1
        caches = one["caches"] if isinstance(one["caches"], bool) else one["caches"]["as held"]
        return all(one["texts"].values()) and messages and caches and one["taps off by"] < CLOSE
    if one.get("what") == "text":
        return all(one["equal"]) and one["messages"] == one["rounds"] + 1
    return all(one.get("equal", [True]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
