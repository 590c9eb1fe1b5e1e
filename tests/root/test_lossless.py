"""Drafted text equals plain text: every target x drafter x way to decode, and all samplers.

By default each family is decoded in each way with one or two drafters, some greedily and some
sampled, and each pair of `pairs.py` in some ways. `pytest -m matrix` runs all combinations.
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
# The long prompt repeats itself, so that lookup drafts, and is longer than the families' windows.
# The second prompt begins with SHARED tokens of the first.
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
    """One request after the other."""
    return [dm.generate(target, drafter, prompt, **settings) for prompt in PROMPTS]


def batch(target, drafter, settings):
    """All requests in the same steps."""
    with dm.Engine(target, drafter) as engine:
        jobs = [engine.submit(prompt, **settings) for prompt in PROMPTS]
        return [job.result() for job in jobs]


def tree(target, drafter, settings, decode=alone):
    """Drafts are trees, where the drafter can make them."""
    if isinstance(drafter, TextOracle):
        drafter.branches = True
    elif drafts_trees(drafter):
        settings = settings | {"tree_budget": 8}
    return decode(target, drafter, settings)


def trees(target, drafter, settings):
    """Trees of all requests in the same steps."""
    return tree(target, drafter=drafter, settings=settings, decode=batch)


def prefix(target, drafter, settings):
    """A prefix store: the second prompt reuses the first one's, which is asked again at the end."""
    store = dm.PrefixStore(target, drafter, memory=2**28, chunk=8)
    first, *others = alone(target, drafter, settings | {"prefix": store})
    again = dm.generate(target, drafter, PROMPTS[0], prefix=store, **settings)
    assert again.tokens == first.tokens and again.stats.reused_tokens > 0
    return [again, *others]


def conversation(target, drafter, settings):
    """A first turn reads a beginning; the prompts then continue it or go back into it."""
    kept = dm.Conversation(target, drafter, settings["kv_bits"])
    first_turn = settings | {"max_tokens": 1, "conversation": kept}
    dm.generate(target, drafter, PROMPTS[0][:SHARED], **first_turn)
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
        tokens = []
        finish_reason = None
        while finish_reason is None:
            with ThreadPoolExecutor(1) as pool:
                event = pool.submit(next, events).result()
            tokens += event.tokens
            finish_reason = event.finish_reason
        result = dm.Result("", tokens=tokens, finish_reason=finish_reason, stats=event.stats)
        results.append(result)
    return results


def pieces(target, drafter, settings):
    """As on a GPU: a verification's first layers are computed while its last ones are built."""
    early = target_of(target.model, target.name)
    early.dispatches_early = True
    return alone(early, drafter, settings)


WAYS = {"alone": alone, "batch": batch, "tree": tree, "trees": trees, "prefix": prefix}
WAYS |= {"conversation": conversation, "threads": threads, "kv_bits": alone, "pieces": pieces}


def cases():
    """Every family, drafter and way; combinations that only `-m matrix` runs are marked.

    Every sixth combination of a family runs by default, every fourth of a pair, and all of
    ("oracle", "alone").
    """
    for family_number, family in enumerate((*FAMILIES, *PAIRS)):
        is_pair = family in PAIRS
        ways = list(WAYS)
        if family not in QUANTIZABLE:
            ways.remove("kv_bits")
        if is_pair:
            ways.remove("pieces")
        drafters = [None] if is_pair else list(DRAFTERS)
        every = 4 if is_pair else len(DRAFTERS)
        for way_number, way in enumerate(ways):
            for drafter_number, drafter in enumerate(drafters):
                number = family_number + way_number + drafter_number
                by_default = number % every == 0 or (drafter, way) == ("oracle", "alone")
                marks = [] if by_default else [pytest.mark.matrix]
                yield pytest.param(family, drafter, way, marks=marks)


@pytest.mark.parametrize(("family", "drafter", "way"), cases())
def test_drafted_text_is_plain_text(family, drafter, way):
    target = model(family)
    if way in ("tree", "trees") and not target.supports_trees:
        pytest.skip("reads chains only")
    # Spread greedy and sampled decoding, and 8 and 4 bits, over the combinations.
    number = (*FAMILIES, *PAIRS).index(family) + [*WAYS].index(way)
    sampled = number % 2 == 1
    bits = None
    if way == "kv_bits":
        bits = 8 if number % 4 < 2 else 4
    expected = plain(family, sampled, bits)
    texts = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    settings = {"max_tokens": TOKENS, "block_size": 4, "kv_bits": bits}
    settings |= SAMPLED if sampled else {}
    network = DRAFTERS[drafter](target, texts) if drafter else pair(family)[1]
    results = WAYS[way](target, network, settings)
    assert [result.tokens for result in results] == expected
    # Lookup drafts only where a text happens to repeat itself, which test_lookup.py tests.
    if network is not None and not isinstance(network, LookupDrafter):
        assert sum(result.stats.drafted_tokens for result in results) > 0
    if way in ("tree", "trees") and drafter in ("oracle", "network"):
        assert results[0].stats.trees


def forbid_repetition(tokens, logits):
    """A user's processor, which forbids the last token to follow itself."""
    return mx.where(mx.arange(logits.shape[-1]) == tokens[-1], -mx.inf, logits)


SAMPLERS = {
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
SAMPLERS["everything"] = (
    SAMPLERS["top-k"] | SAMPLERS["top-p"] | SAMPLERS["min-p"] | SAMPLERS["penalties"]
)
SAMPLERS["a processor"] = {"logits_processors": [forbid_repetition]}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
def test_drafted_text_is_plain_text_with_every_sampler(temperature, sampler):
    """With drafts that are always right, often right, and (the network's) nearly always wrong."""
    tokens = 48
    prompt = LONG[:20]
    target, network = pair("DFlash")
    settings = {"temperature": temperature, "seed": 11, "max_tokens": tokens} | SAMPLERS[sampler]
    plain = dm.generate(target, None, prompt, **settings)
    assert plain.stats.rounds == tokens - 1
    for p in (1.0, 0.7):
        oracle = Oracle(prompt, answer=plain.tokens, vocab_size=target.vocab_size, p=p)
        drafted = dm.generate(target, oracle, prompt, **settings)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.rounds < tokens - 1
    assert dm.generate(target, network, prompt, **settings).tokens == plain.tokens
