"""Drafted text is plain text: every target x drafter x way to decode, and all choices of tokens.

By default each family is decoded each way with one or two drafters, greedy and sampled in turn, and
each pair of `pairs.py` some ways; `pytest -m matrix` runs all combinations. What is special about a
family, a drafter or a way is tested elsewhere.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from families import (
    FAMILIES,
    QUANTIZABLE,
    dspark_for,
    eagle3_for,
    family_target,
    plain_tokens,
    small_prompt,
    target_of,
)
from oracle import Oracle
from pairs import PAIRS, pair
from request_set import TextOracle

import dflash_mlx as dm
from dflash_mlx.drafter.draft_model import DraftModel
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter, LookupDrafter
from dflash_mlx.drafter.protocol import drafts_trees

pytestmark = pytest.mark.by_family

TOKENS = 14
SAMPLED = {"temperature": 0.8, "seed": 7}
# A prompt repeats itself for the lookup, and is longer than the families' windows; two begin alike.
LONG = small_prompt(12, 1) * 3
SHARED = 30
PROMPTS = [LONG, [*LONG[:SHARED], *small_prompt(9, 2)], small_prompt(5, 3)]

DRAFTERS = {
    "oracle": lambda target, texts: TextOracle(
        texts, vocab_size=256, p=0.7, taps=(0, target.num_layers - 1)
    ),
    "lookup": lambda target, texts: LookupDrafter(),
    "network": lambda target, texts: dspark_for(target),
    "network and lookup": lambda target, texts: CombinedDrafter(dspark_for(target)),
    "token by token": lambda target, texts: eagle3_for(target),
    "itself": lambda target, texts: DraftModel(target),
}


@functools.cache
def model(family: str) -> dm.Target:
    return pair(family)[0] if family in PAIRS else family_target(family)


@functools.cache
def plain(family: str, sampled: bool, kv_bits: int | None) -> list[list[int]]:
    """The texts without a drafter; greedy ones are decoded by mlx-lm itself where it can."""
    if sampled or kv_bits or family in PAIRS:
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


def tree(target, drafter, settings, decode=alone):
    if isinstance(drafter, TextOracle):
        drafter.branches = True
    elif drafts_trees(drafter):
        settings = settings | {"tree_budget": 8}
    return decode(target, drafter, settings)


def trees(target, drafter, settings):
    return tree(target, drafter=drafter, settings=settings, decode=batch)


def prefix(target, drafter, settings):
    """The second prompt begins like the first one, which is then asked again."""
    store = dm.PrefixStore(target, drafter, memory=2**28, chunk=8)
    first, *others = alone(target, drafter, settings | {"prefix": store})
    again = dm.generate(target, drafter, PROMPTS[0], prefix=store, **settings)
    assert again.tokens == first.tokens and again.stats.reused_tokens > 0
    return [again, *others]


def conversation(target, drafter, settings):
    """A first turn reads a beginning; the prompts then continue it or go back into it."""
    kept = dm.Conversation(target, drafter, settings["kv_bits"])
    begun = settings | {"max_tokens": 1, "conversation": kept}
    dm.generate(target, drafter, PROMPTS[0][:SHARED], **begun)
    results = alone(target, drafter, settings | {"conversation": kept})
    assert results[0].stats.reused_tokens == SHARED and results[1].stats.reused_tokens > 0
    lookup = kept.caches.draft_session.lookup
    assert lookup is None or lookup._index.tokens == kept.ids
    return results


def threads(target, drafter, settings):
    """Each event is taken in another thread."""
    results = []
    for prompt in PROMPTS:
        events = dm.stream_generate(target, drafter, prompt, **settings)
        taken = []
        while not taken or taken[-1].finish_reason is None:
            with ThreadPoolExecutor(1) as pool:
                taken.append(pool.submit(next, events).result())
        tokens = [token for event in taken for token in event.tokens]
        results.append(
            dm.Result(
                "", tokens=tokens, finish_reason=taken[-1].finish_reason, stats=taken[-1].stats
            )
        )
    return results


def pieces(target, drafter, settings):
    """As a GPU computes it: the first layers of a verify before the last ones are built."""
    early = target_of(target.model, target.name)
    early.in_pieces = True
    return alone(early, drafter, settings)


WAYS = {"alone": alone, "batch": batch, "tree": tree, "trees": trees, "prefix": prefix}
WAYS |= {"conversation": conversation, "threads": threads, "kv_bits": alone, "pieces": pieces}


def cases():
    """Every family, drafter and way; combinations that only `-m matrix` runs are marked."""
    for index, family in enumerate((*FAMILIES, *PAIRS)):
        without = {"kv_bits": family not in QUANTIZABLE, "pieces": family in PAIRS}
        for number, way in enumerate(way for way in WAYS if not without.get(way)):
            drafters = [None] if family in PAIRS else [*DRAFTERS]
            for place, drafter in enumerate(drafters):
                few = (index + number + place) % (len(DRAFTERS) if drafter else 4)
                rare = few and (drafter, way) != ("oracle", "alone")
                yield pytest.param(family, drafter, way, marks=[pytest.mark.matrix] * bool(rare))


@pytest.mark.parametrize(("family", "drafter", "way"), cases())
def test_drafted_text_is_plain_text(family, drafter, way):
    target = model(family)
    if way in ("tree", "trees") and not target.supports_trees:
        pytest.skip("reads chains only")
    turn = (*FAMILIES, *PAIRS).index(family) + [*WAYS].index(way)
    bits = (8, 4)[turn // 2 % 2] if way == "kv_bits" else None
    sampled = turn % 2 == 1
    expected = plain(family, sampled, bits)
    texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    settings = {"max_tokens": TOKENS, "block_size": 4, "kv_bits": bits}
    settings |= SAMPLED if sampled else {}
    made = DRAFTERS[drafter](target, texts) if drafter else pair(family)[1]
    results = WAYS[way](target, made, settings)
    assert [result.tokens for result in results] == expected
    # The lookup drafts where a text happens to repeat itself; test_lookup.py sees to that.
    looks_up = made is None or isinstance(made, LookupDrafter)
    assert looks_up or sum(result.stats.drafted_tokens for result in results) > 0
    if way in ("tree", "trees") and drafter in ("oracle", "network"):
        assert results[0].stats.trees


def never_twice(tokens, logits):
    """A user's processor, which forbids to repeat the last token."""
    return mx.where(mx.arange(logits.shape[-1]) == tokens[-1], -mx.inf, logits)


CHOICES = {
    "all tokens": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.02},
    "penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_context_size": 64,
        "logit_bias": {5: 2.0, 9: -3.0},
    },
}
CHOICES["everything"] = {name: value for each in CHOICES.values() for name, value in each.items()}
CHOICES["a processor"] = {"logits_processors": [never_twice]}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
def test_drafted_text_is_plain_text_however_tokens_are_chosen(temperature, choice):
    tokens = 48
    (target, network) = pair("DFlash")
    settings = {"temperature": temperature, "seed": 11, "max_tokens": tokens} | CHOICES[choice]
    plain = dm.generate(target, None, LONG[:20], **settings)
    assert plain.stats.rounds == tokens - 1
    for p in (1.0, 0.7, None):  # None: the network, whose drafts are nearly all wrong
        drafter = (
            network
            if p is None
            else Oracle(LONG[:20], answer=plain.tokens, vocab_size=target.vocab_size, p=p)
        )
        drafted = dm.generate(target, drafter, LONG[:20], **settings)
        assert drafted.tokens == plain.tokens
        assert p is None or drafted.stats.rounds < tokens - 1
