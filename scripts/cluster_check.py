"""Compares ranks on this machine with one process: every tiny family, and the embedded pair.

    python scripts/cluster_check.py 2 4          all families and the pair, over 2 and over 4 ranks
    python scripts/cluster_check.py 4 kimi_k25   one family over 4 ranks

The tests do a part of it. Ranks that wait keep a core busy, so 4 of them on 2 cores take minutes a
family. Exit code 1 for a text that differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clusters import run_ranks
from families import FAMILIES

SECONDS = 1800
TOKENS = 256  # for which sums are counted


def main(arguments: list[str]) -> int:
    sizes = [int(one) for one in arguments if one.isdecimal()]
    names = [one for one in arguments if not one.isdecimal()]
    good = True
    for size in sizes or [2]:
        for family in names or FAMILIES:
            good &= _show(_run("cluster_families.py", size, family))
        if not names and size == 2:
            good &= _show(_run("cluster_pair.py", size, "texts", "turns", "together"))
            _show(_run("cluster_pair.py", size, f"sums={TOKENS}"))
    return 0 if good else 1


def _run(program: str, size: int, *arguments: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(program, size, Path(folder), *arguments, seconds=SECONDS)


def _show(found: list[dict[str, Any]]) -> bool:
    good = True
    for one in found:
        if "caches" in one:
            same = sum(len(set(ranks)) == 1 for ranks in one["caches"])
            one["caches"] = f"{same} of {len(one['caches'])} arrays are the same on all ranks"
        equal = [*one.get("texts", {}).values(), *one.get("equal", [])]
        good &= all(equal)
        one.pop("stats", None)
        print("ok  " if all(equal) else "MISS", json.dumps(one), flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
