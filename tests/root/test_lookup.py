"""Drafts from the text itself: the index, what is learnt of its matches, and the answers."""

import mlx.core as mx
from bigrams import Scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import policy_with_costs

import dflash_mlx as dm
from dflash_mlx.bench.datasets import embedded_prompts
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter, LookupDrafter
from dflash_mlx.drafter.prompt_lookup import MAX_MATCH, NGRAM_LENGTHS, Index, LookupRates
from dflash_mlx.drafter.protocol import DraftSession
from dflash_mlx.proposal import Proposal

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest(text, token):
    """The longest match of the end among the last places of all n-grams, by looking everywhere."""
    whole = [*text, token]
    best = (0, 0)
    for length in NGRAM_LENGTHS:
        ends = [e for e in range(length, len(text) + 1) if text[e - length : e] == whole[-length:]]
        if len(whole) < length or not ends:
            continue
        matched = length
        while matched < min(MAX_MATCH, ends[-1]) and (
            text[ends[-1] - matched - 1] == whole[-matched - 1]
        ):
            matched += 1
        best = max(best, (matched, ends[-1]), key=lambda match: match[0])
    return best


@given(TEXTS, st.integers(0, 3))
@settings(max_examples=200)
def test_the_index_finds_what_a_search_finds(text, token):
    index = Index()
    index.extend(text)
    place, matched = index.find(token)
    assert (matched, place) == longest(text, token)


@given(TEXTS, TEXTS, st.data())
def test_a_trimmed_index_equals_one_that_never_saw_the_rest(text, more, data):
    kept = data.draw(st.integers(0, len(text)))
    index = Index()
    fresh = Index()
    index.extend(text)
    index.trim_to(kept)
    fresh.extend([*text[:kept], *more])
    index.extend(more)
    assert index.tokens == fresh.tokens and index._places == fresh._places


def test_a_draft_follows_the_text_and_then_itself():
    """At the end of the text it repeats the tokens that it has drafted so far."""
    index = Index()
    index.extend([5, 6, 7, 5, 6])
    place, matched = index.find(7)
    assert (place, matched) == (3, 3)
    assert index.follow(place, 7, 8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_rates_rise_with_right_drafts_and_fall_with_wrong_ones():
    rates = LookupRates()
    assert rates.expected(40, 4)[0] > rates.expected(8, 4)[0] > rates.expected(2, 4)[0]
    for _ in range(30):
        rates.learn(40, 4, 0)
        rates.learn(2, 4, 4)
    assert rates.expected(40, 4)[0] < 0.2 and min(rates.expected(2, 4)) > 0.8


def priced(drafter, row=0.05, draft=0.1):
    """A policy for which a further row and a draft cost these parts of a plain step."""
    return policy_with_costs(drafter.block_size, row, draft)


def copying():
    """A prompt with a file of 60 lines, and an answer that repeats it with one name changed."""
    encode = dm.load("tiny", draft="none")[0].tokenizer.encode
    lines = [f"def area_{n}(width, height):\n    return width * {7 * n % 90}" for n in range(30)]
    file = "\n".join(lines) + "\n"
    prompt = encode(f"Rename area_17 to size_17 in this file:\n{file}Answer:\n")
    answer = encode(file.replace("area_17", "size_17"))
    return prompt, answer


def cost(result, draft=0.0, row=0.05):
    """The cost of a text in plain steps: `row` for each further row, `draft` for each draft."""
    return sum(
        count * (1 + row * (rows - 1) + (draft if rows > 1 else 0))
        for rows, count in result.stats.widths.items()
    )


def test_a_file_is_repeated_with_one_name_changed():
    """Counted, not timed: forwards, and their rows at a twentieth of a plain token each."""
    prompt, answer = copying()
    assert len(answer) > 600
    subject = Scripted(prompt, answer, 1024)
    drafter = LookupDrafter()
    settings = {"max_tokens": len(answer)}
    plain = dm.generate(subject, None, prompt, **settings)
    drafted = dm.generate(subject, drafter, prompt, policy=priced(drafter), **settings)
    assert drafted.tokens == plain.tokens == answer
    assert drafted.stats.rounds < len(answer) / 8
    assert cost(plain) / cost(drafted) > 5


class Wrong:
    """A network that knows nothing, combined with the lookup; it counts how often it is asked."""

    tap_layers = ()
    block_size = 16
    identity = "wrong"
    drafts_trees = False

    def start(self, target, sampler):
        return WrongSession(self)

    asked = 0


class WrongSession(DraftSession):
    def __init__(self, drafter):
        self.drafter = drafter

    def extend(self, taps, kept=None, tokens=()):
        pass

    def propose(self, anchor, width):
        self.drafter.asked += width > 1
        return Proposal(mx.array([anchor, *[1023] * (width - 1)]))


def test_a_network_that_is_always_wrong_is_hardly_asked_when_lookup_drafts():
    prompt, answer = copying()
    network = Wrong()
    subject = Scripted(prompt, answer, 1024)
    drafter = CombinedDrafter(network)
    policy = priced(drafter)
    drafted = dm.generate(subject, drafter, prompt, max_tokens=len(answer), policy=policy)
    assert drafted.tokens == answer
    assert drafted.stats.rounds < len(answer) / 8 and network.asked < drafted.stats.rounds / 4


def test_where_nothing_repeats_lookup_hardly_costs_anything():
    """On the embedded prompts, lookup beside the network adds 3 % to the work at most."""
    subject, network = dm.load("tiny")
    beside = CombinedDrafter(network)
    alone_policy = priced(network)
    beside_policy = priced(beside)
    works = {"alone": 0.0, "beside": 0.0}
    for prompt in embedded_prompts()[::8]:
        alone = dm.generate(subject, network, prompt.messages, max_tokens=64, policy=alone_policy)
        both = dm.generate(subject, beside, prompt.messages, max_tokens=64, policy=beside_policy)
        assert both.tokens == alone.tokens
        works["alone"] += cost(alone, draft=0.1)
        works["beside"] += cost(both, draft=0.1)  # though the lookup's drafts cost nothing
    assert works["alone"] >= 0.97 * works["beside"]
