"""Drafted text is plain text: every family x drafter x way to decode.

Each family meets each way with one drafter, and greedy and sampled texts by turns; `pytest -m
matrix` runs all of them. What is special about a family, a drafter or a way has tests of its own.
"""

import functools

import pytest
from crowd import Knowing
from families import (
    FAMILIES,
    QUANTIZABLE,
    dspark_for,
    eagle3_for,
    plain_tokens,
    random_model,
    random_prompt,
    target_of,
)

import dflash_mlx as dm
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.lookup import CombinedDrafter, LookupDrafter
from dflash_mlx.drafter.protocol import drafts_trees

pytestmark = pytest.mark.by_family

TOKENS, SAMPLED = 14, {"temperature": 0.8, "seed": 7}
# A prompt repeats itself for the lookup, and is longer than the families' windows; two begin alike.
LONG = random_prompt(12, 1) * 3
PROMPTS = [LONG, [*LONG[:30], *random_prompt(9, 2)], random_prompt(5, 3)]

DRAFTERS = {
    "oracle": lambda target, texts: Knowing(texts, 256, 0.7, (0, target.num_layers - 1)),
    "lookup": lambda target, texts: LookupDrafter(),
    "network": lambda target, texts: dspark_for(target),
    "network and lookup": lambda target, texts: CombinedDrafter(dspark_for(target)),
    "token by token": lambda target, texts: eagle3_for(target),
    "itself": lambda target, texts: DraftModel(target),
}


@functools.cache
def model(family: str) -> dm.Target:
    return target_of(random_model(family), family)


@functools.cache
def plain(family: str, sampled: bool, kv_bits: int | None) -> list[list[int]]:
    """The texts without a drafter; greedily mlx-lm's own."""
    if sampled or kv_bits:
        ways = {"max_tokens": TOKENS, "kv_bits": kv_bits} | (SAMPLED if sampled else {})
        return [dm.generate(model(family), None, prompt, **ways).tokens for prompt in PROMPTS]
    return [plain_tokens(model(family).model, prompt, TOKENS) for prompt in PROMPTS]


def alone(target, drafter, settings):
    return [dm.generate(target, drafter, prompt, **settings) for prompt in PROMPTS]


def batch(target, drafter, settings):
    """All in the same steps, one of them with a tree's rows."""
    with dm.Engine(target, drafter) as engine:
        jobs = [engine.submit(prompt, **settings) for prompt in PROMPTS]
        return [job.result() for job in jobs]


def tree(target, drafter, settings):
    if isinstance(drafter, Knowing):
        drafter.branches = True
    elif drafts_trees(drafter):
        settings = settings | {"tree_budget": 8}
    return alone(target, drafter, settings)


def prefix(target, drafter, settings):
    """The second prompt goes on from a part of the first one, and the first comes again."""
    store = dm.PrefixStore(target, drafter, memory=2**28, chunk=8)
    first, *others = alone(target, drafter, settings | {"prefix": store})
    again = dm.generate(target, drafter, PROMPTS[0], prefix=store, **settings)
    assert again.tokens == first.tokens and again.stats.reused_tokens > 0
    return [again, *others]


def pieces(target, drafter, settings):
    """As a GPU computes it: the first layers of a verify before the last ones are built."""
    early = target_of(target.model, target.name)
    early.in_pieces = True
    return alone(early, drafter, settings)


WAYS = {"alone": alone, "batch": batch, "tree": tree, "prefix": prefix, "kv_bits": alone}
WAYS |= {"pieces": pieces}
CASES = [
    pytest.param(
        *(family, drafter, way),
        marks=[] if (at + number + place) % len(DRAFTERS) == 0 else pytest.mark.matrix,
    )
    for at, family in enumerate(FAMILIES)
    for number, way in enumerate(WAYS)
    for place, drafter in enumerate(DRAFTERS)
    if way != "kv_bits" or family in QUANTIZABLE
]


@pytest.mark.parametrize(("family", "drafter", "way"), CASES)
def test_drafted_text_is_plain_text(family, drafter, way):
    target, place = model(family), [*DRAFTERS].index(drafter)
    if way == "tree" and not target.supports_trees:
        pytest.skip("reads chains only")
    bits = 8 - 4 * (place % 2) if way == "kv_bits" else None
    sampled = (FAMILIES.index(family) + [*WAYS].index(way)) % 2 == 1
    expected = plain(family, sampled, bits)
    texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    settings = {"max_tokens": TOKENS, "block_size": 6, "kv_bits": bits}
    settings |= SAMPLED if sampled else {}
    results = WAYS[way](target, DRAFTERS[drafter](target, texts), settings)
    assert [result.tokens for result in results] == expected
    # The lookup drafts where a text happens to repeat itself; test_lookup.py sees to that.
    assert drafter == "lookup" or sum(result.stats.drafted_tokens for result in results) > 0
    if way == "tree" and drafter in ("oracle", "network"):
        assert results[0].stats.trees
