"""Compare ranks on this machine with one process: every tiny family, and the embedded pair.

    python scripts/cluster_check.py 2 4              all families and the pair, over 2 and 4 ranks
    python scripts/cluster_check.py 4 kimi_k25       one family over 4 ranks; `pair` is the pair
    python scripts/cluster_check.py --pipeline 2 4   split by layers instead of heads

Compares texts at temperature 0 and 0.8, chains and trees; three requests that join one after the
other, and a fourth that is cancelled; messages per step; tapped layers; and caches, bit for bit
where ranks hold the same heads or layers. For the pair, all sums of 256 tokens are counted.

The tests run a part of this. Waiting ranks keep a core busy: 4 ranks on 2 cores take a minute per
family. The exit code is 1 after any difference.
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
TOKENS = 256  # whose sums are counted
PAIR, PIPELINE = "pair", "--pipeline"
CLOSE = 1e-4  # tolerance for sums in another order


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
    """Whether everything equals one process, with one message per step."""
    if "texts" in one:
        messages = one["rounds"] == one["messages"] and one["sums a message"] == 1
        caches = one["caches"] if isinstance(one["caches"], bool) else one["caches"]["as held"]
        return all(one["texts"].values()) and messages and caches and one["taps off by"] < CLOSE
    if one.get("what") == "text":
        return all(one["equal"]) and one["messages"] == one["rounds"] + 1
    return all(one.get("equal", [True]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
