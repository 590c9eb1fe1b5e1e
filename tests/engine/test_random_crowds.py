"""Random crowds of every kind of drafter, with prefixes of every length and raising callbacks.

    python tests/engine/test_random_crowds.py 100000

plays crowds until they have so many tokens, and prints what came of them.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, cycle
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[:0] = map(str, (root / "helpers", *(each for each in root.iterdir() if each.is_dir())))

import pytest
import test_gemma4_assistant
import test_lilicorr
import test_mtp
from crowd import Tally, play
from families import dspark_for, eagle3_for, random_model, target_of
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.drafter.lookup import CombinedDrafter, LookupDrafter
from dflash_mlx.drafter.model import DraftModel


def lilicorr() -> tuple[dm.Target, Any]:
    return target(), test_lilicorr.drafter_for(target())[1]


def pair_of(family: str, drafter_for: Callable[[dm.Target], Any]) -> tuple[dm.Target, Any]:
    found = target_of(random_model(family), family)
    return found, drafter_for(found)


PAIRS: dict[str, Callable[[], tuple[dm.Target, Any]]] = {
    "none": lambda: (target(), None),
    "lookup": lambda: (target("gpt_oss"), LookupDrafter()),
    "DFlash": lambda: (target(), random_drafter()),
    "DFlash of windows": lambda: (target("sliding llama"), random_drafter()),
    "DFlash and lookup": lambda: (target("qwen3_moe"), CombinedDrafter(random_drafter())),
    "LiliCorr": lilicorr,
    "MTP": lambda: test_mtp.pair("mimo"),
    "DSpark": lambda: pair_of("qwen3", dspark_for),
    "EAGLE-3": lambda: pair_of("qwen3", eagle3_for),
    "EAGLE-3 of a hybrid": lambda: pair_of("qwen3_5", eagle3_for),
    "assistant": lambda: test_gemma4_assistant.pair("gemma4_dense"),
    "draft model": lambda: (target(), DraftModel(target("llama"))),
}
pair = cache(lambda kind: PAIRS[kind]())


def right(tally: Tally) -> bool:
    constants = 2**14  # bytes that a model makes once; a request's caches are many more
    return tally.wrong == tally.hanging == 0 and tally.kept_bytes < constants


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2))])
def test_every_text_is_the_plain_one_or_ends_with_its_own_error(kind, seed):
    tally = Tally()
    play(*pair(kind), seed, 12, tally)
    play(*pair(kind), seed + 100, 12, tally)
    assert right(tally) and tally.jobs == 24 and tally.raised, tally


@pytest.mark.parametrize("kind", ["MTP", "EAGLE-3 of a hybrid"])
@pytest.mark.parametrize("chunk", [1, 2, 8, 256])
def test_a_prompt_of_each_length_beside_a_prefix_store(kind, chunk):
    """With windows and heads, a checkpoint stands 16 tokens before a prompt's end: behind 1 of 17.

    Each twice: the second time it begins behind what the first one has stored.
    """
    model, drafter = pair(kind)
    store = dm.PrefixStore(model, drafter, memory=2**28, chunk=chunk)
    for length in (1, 2, 3, 15, 16, 17, 18, 19, 20, 33, 40):
        prompt = [(7 * at + length) % 97 + 2 for at in range(length)]
        plain = dm.generate(model, None, prompt, max_tokens=5).tokens
        for _ in range(2):
            assert dm.generate(model, drafter, prompt, max_tokens=5, prefix=store).tokens == plain


def main(tokens: int) -> Iterator[str]:
    tally = Tally()
    for seed, kind in zip(count(), cycle(PAIRS), strict=False):
        play(*pair(kind), seed, 30, tally)
        yield f"{kind}, seed {seed}: {tally}"
        if tally.tokens >= tokens or not right(tally):
            break


if __name__ == "__main__":
    for line in main(int(sys.argv[1])):
        print(line, flush=True)
