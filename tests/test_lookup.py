"""Drafts from the text itself: the index, what is learnt of its matches, and the text that comes."""

import random

import pytest
from families import FAMILIES, plain_tokens, random_model, random_prompt, target_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.conversation import Conversation
from dflash_mlx.drafter.beside import Beside
from dflash_mlx.drafter.lookup import LENGTHS, MOST, Index, Lookup, Rates
from dflash_mlx.drafter.protocol import Bounded, Foresees, Identified, ReadsText, Resumable
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.widths import Policy
from dflash_mlx.sampling import Sampler

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest(text, token):
    """The longest match of the end among the last places of all n-grams, by looking everywhere."""
    whole, best = [*text, token], (0, 0)
    for length in LENGTHS:
        ends = [e for e in range(length, len(text) + 1) if text[e - length : e] == whole[-length:]]
        if len(whole) < length or not ends:
            continue
        matched = length
        while matched < min(MOST, ends[-1]) and (
            text[ends[-1] - matched - 1] == whole[-matched - 1]
        ):
            matched += 1
        best = max(best, (matched, ends[-1]), key=lambda found: found[0])
    return best


@given(TEXTS, st.integers(0, 3))
@settings(max_examples=200)
def test_the_index_finds_what_a_search_finds(text, token):
    index = Index()
    for each in text:
        index.add(each)
    place, matched = index.find(token)
    assert (matched, place) == longest(text, token)


@given(TEXTS, TEXTS, st.data())
def test_an_index_that_was_cut_is_one_that_never_saw_the_rest(text, more, data):
    kept = data.draw(st.integers(0, len(text)))
    index, fresh = Index(), Index()
    for token in text:
        index.add(token)
    index.cut(kept)
    for token in [*text[:kept], *more]:
        fresh.add(token)
    for token in more:
        index.add(token)
    assert index.tokens == fresh.tokens and index._places == fresh._places


def test_a_draft_follows_the_text_and_then_itself():
    index = Index()
    for token in [5, 6, 7, 5, 6]:
        index.add(token)
    place, matched = index.find(7)
    assert (place, matched) == (3, 3)
    assert index.follow(place, 7, 8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_rates_follow_what_was_right():
    rates = Rates()
    assert rates.of(40, 4)[0] > rates.of(8, 4)[0] > rates.of(2, 4)[0]
    for _ in range(30):
        rates.learn(40, 4, 0)
        rates.learn(2, 4, 4)
    assert rates.of(40, 4)[0] < 0.2 and min(rates.of(2, 4)) > 0.8


def test_it_fits_the_protocol():
    drafter = Lookup()
    session = drafter.start(target(), Sampler())
    assert isinstance(drafter, Bounded) and isinstance(drafter, Identified)
    for protocol in (Foresees, ReadsText, Resumable):
        assert isinstance(session, protocol)
        assert isinstance(Beside(random_drafter()).start(target(), Sampler()), protocol)


def priced(drafter, row=0.05, draft=0.1):
    """A policy of a pair whose rows cost so much of a plain token."""
    widest = drafter.block_size
    verify = {rows: 1 + row * (rows - 1) for rows in range(1, widest + 1)}
    draft = 0.0 if isinstance(drafter, Lookup) else draft
    return Policy(Costs({64: verify}, {64: dict.fromkeys(verify, draft) | {1: 0.0}}), widest)


def looping(count):
    """A target whose greedy text repeats itself, as small ones do, and that text."""
    model = target()
    for seed in range(40):
        prompt = [random.Random(seed).randrange(150) for _ in range(12)]
        text = dm.generate(model, None, prompt, max_tokens=count).tokens
        if len(set(text[-40:])) < 20:
            return model, prompt, text
    raise AssertionError("no seed repeats itself")


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plain_text(temperature, policy):
    model, drafter = target(), Lookup()
    prompt = random_prompt(30, 1)
    prompt = [token % 150 for token in prompt] * 3
    settings = {"max_tokens": 60, "temperature": temperature, "seed": 4}
    plain = dm.generate(model, None, prompt, **settings)
    with_policy = {"policy": priced(drafter)} if policy else {}
    drafted = dm.generate(model, drafter, prompt, **settings, **with_policy)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted_tokens > 0


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plain_text_with_a_network_beside_it(temperature, policy):
    model, drafter = target(), Beside(random_drafter())
    prompt = [token % 150 for token in random_prompt(30, 1)] * 3
    settings = {"max_tokens": 60, "temperature": temperature, "seed": 4}
    plain = dm.generate(model, None, prompt, **settings)
    with_policy = {"policy": priced(drafter)} if policy else {}
    drafted = dm.generate(model, drafter, prompt, **settings, **with_policy)
    assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_plain_text_in_every_family(family):
    model = random_model(family)
    subject, prompt = target_of(model, family), random_prompt(10, 1) * 2
    drafter = Lookup()
    found = dm.generate(subject, drafter, prompt, max_tokens=12, policy=priced(drafter))
    assert found.tokens == plain_tokens(model, prompt, 12)


def test_text_that_repeats_itself_takes_few_forwards():
    model, prompt, text = looping(160)
    drafter = Lookup()
    drafted = dm.generate(model, drafter, prompt, max_tokens=160, policy=priced(drafter))
    assert drafted.tokens == text
    assert drafted.stats.rounds < 160 / 2.5


def test_beside_a_network_that_knows_nothing_the_lookup_drafts_and_the_network_is_left_out():
    model, prompt, text = looping(160)
    drafter = Beside(random_drafter())
    drafted = dm.generate(model, drafter, prompt, max_tokens=160, policy=priced(drafter))
    assert drafted.tokens == text
    assert drafted.stats.rounds < 160 / 2.5


def test_a_conversation_goes_on_and_goes_back():
    model, drafter = target(), Beside(random_drafter())
    for drafting in (Lookup(), drafter):
        talk = Conversation(model, drafting)
        first = [7, 8, 9, 10, 11] * 4
        one = dm.generate(model, drafting, first, max_tokens=20, conversation=talk)
        second = [*first, *one.tokens, 3, 4]
        two = dm.generate(model, drafting, second, max_tokens=20, conversation=talk)
        assert two.stats.reused_tokens > 0
        assert two.tokens == dm.generate(model, None, second, max_tokens=20).tokens
        again = [*first, *one.tokens[:5], 90, 91, 92]  # the last turn undone
        three = dm.generate(model, drafting, again, max_tokens=20, conversation=talk)
        assert three.stats.reused_tokens > 0
        assert three.tokens == dm.generate(model, None, again, max_tokens=20).tokens


def test_two_branches_are_verified_together_and_the_right_one_is_kept():
    """A network that is always wrong, and a text that the lookup knows: the second branch counts."""
    model, prompt, text = looping(160)
    session = Beside(random_drafter()).start(model, Sampler())
    known = [*prompt, *text]
    session.read(known[:-60])
    place = known[-60]
    for taps in model.start(session.network._drafter.tap_layers).prefill(known[:-60]):
        session.extend(taps)
    assert session.foresee(place, 8)
    tree = session.propose_both(place, 4, 5)
    assert tree.parents == (-1, 0, 1, 2, 0, 4, 5, 6, 7)
    assert tree.tokens.tolist()[4:] == known[-59:-54]
    reader = model.start()
    list(reader.prefill(known[:-60]))
    logits, _ = reader.verify(tree)
    assert logits.argmax(axis=-1).tolist()[4:] == known[-58:-53]
