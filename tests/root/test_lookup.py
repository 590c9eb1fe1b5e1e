"""Prompt lookup, which drafts from the text itself: its index, its learned rates, its answers."""

import mlx.core as mx
from bigrams import ScriptedTarget
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


def best_match(text, token):
    """The match that the index should find for text + token, as (end of the match, its length).

    For each n-gram length, take the last earlier place of the n-gram that ends the text, and extend
    the match backwards as far as the tokens agree. The longest of these matches wins.
    """
    whole = [*text, token]
    best_end = 0
    best_length = 0
    for ngram in NGRAM_LENGTHS:
        if len(whole) < ngram:
            continue
        suffix = whole[-ngram:]
        ends = [end for end in range(ngram, len(text) + 1) if text[end - ngram : end] == suffix]
        if not ends:
            continue
        end = ends[-1]
        length = ngram
        while length < min(MAX_MATCH, end) and text[end - length - 1] == whole[-length - 1]:
            length += 1
        if length > best_length:
            best_end = end
            best_length = length
    return best_end, best_length


@given(TEXTS, st.integers(0, 3))
@settings(max_examples=200)
def test_the_index_finds_what_a_search_finds(text, token):
    index = Index()
    index.extend(text)
    assert index.find(token) == best_match(text, token)


@given(TEXTS, TEXTS, st.data())
def test_a_trimmed_index_equals_one_that_never_saw_the_rest(text, more, data):
    kept = data.draw(st.integers(0, len(text)), label="tokens kept")
    index = Index()
    fresh = Index()
    index.extend(text)
    index.trim_to(kept)
    fresh.extend([*text[:kept], *more])
    index.extend(more)
    assert index.tokens == fresh.tokens and index._places == fresh._places


def test_a_draft_continues_with_its_own_tokens_at_the_end_of_the_text():
    index = Index()
    index.extend([5, 6, 7, 5, 6])
    place, matched = index.find(7)
    assert (place, matched) == (3, 3)
    assert index.follow(place, 7, 8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_rates_rise_with_right_drafts_and_fall_with_wrong_ones():
    """At first, drafts after longer matches are expected to be right more often."""
    rates = LookupRates()
    long_match = 40
    short_match = 2
    drafts = 4
    first_rates = [rates.expected(match, drafts)[0] for match in (long_match, 8, short_match)]
    assert first_rates[0] > first_rates[1] > first_rates[2]
    for _ in range(30):
        rates.learn(long_match, drafts, 0)
        rates.learn(short_match, drafts, drafts)
    assert rates.expected(long_match, drafts)[0] < 0.2
    assert min(rates.expected(short_match, drafts)) > 0.8


# Costs as parts of a plain step.
ROW_COST = 0.05  # of each further row of a forward
DRAFT_COST = 0.1  # of a draft by the network


def fixed_cost_policy(drafter):
    return policy_with_costs(drafter.block_size, ROW_COST, DRAFT_COST)


def file_copy_task():
    """A prompt with a file of 60 lines, and the answer: the file with one name changed."""
    encode = dm.load("tiny", draft="none")[0].tokenizer.encode
    lines = [f"def area_{n}(width, height):\n    return width * {7 * n % 90}" for n in range(30)]
    file = "\n".join(lines) + "\n"
    prompt = encode(f"Rename area_17 to size_17 in this file:\n{file}Answer:\n")
    answer = encode(file.replace("area_17", "size_17"))
    return prompt, answer


def cost(result, draft_cost):
    """What a text would cost, in plain steps: its forwards, their further rows, its drafts."""
    total = 0.0
    for rows, steps in result.stats.widths.items():
        step_cost = 1 + ROW_COST * (rows - 1)
        if rows > 1:
            step_cost += draft_cost
        total += steps * step_cost
    return total


def test_repeating_a_file_with_lookup_is_five_times_cheaper():
    """The cost is computed from the number of forwards and their rows: nothing is timed."""
    prompt, answer = file_copy_task()
    assert len(answer) > 600
    target = ScriptedTarget(prompt, answer, 1024)
    drafter = LookupDrafter()
    settings = {"max_tokens": len(answer)}
    plain = dm.generate(target, None, prompt, **settings)
    policy = fixed_cost_policy(drafter)
    drafted = dm.generate(target, drafter, prompt, policy=policy, **settings)
    assert drafted.tokens == plain.tokens == answer
    assert drafted.stats.rounds < len(answer) / 8
    assert cost(plain, draft_cost=0.0) / cost(drafted, draft_cost=0.0) > 5


class WrongDrafter:
    """A drafter whose drafts are always wrong, which counts how often it is asked for some."""

    tap_layers = ()
    block_size = 16
    identity = "wrong"
    drafts_trees = False

    def __init__(self):
        self.drafts = 0

    def start(self, target, sampler):
        return WrongSession(self)


class WrongSession(DraftSession):
    def __init__(self, drafter):
        self.drafter = drafter

    def extend(self, taps, kept=None, tokens=()):
        pass

    def propose(self, anchor, width):
        if width > 1:
            self.drafter.drafts += 1
        never_in_the_answer = 1023
        return Proposal(mx.array([anchor, *[never_in_the_answer] * (width - 1)]))


def test_a_network_that_is_always_wrong_is_hardly_asked_when_lookup_drafts():
    prompt, answer = file_copy_task()
    network = WrongDrafter()
    target = ScriptedTarget(prompt, answer, 1024)
    drafter = CombinedDrafter(network)
    policy = fixed_cost_policy(drafter)
    drafted = dm.generate(target, drafter, prompt, max_tokens=len(answer), policy=policy)
    assert drafted.tokens == answer
    assert drafted.stats.rounds < len(answer) / 8
    assert network.drafts < drafted.stats.rounds / 4


def test_lookup_costs_little_where_nothing_repeats():
    """On the embedded prompts, a network with lookup costs at most 3 % more than without."""
    target, network = dm.load("tiny")
    combined = CombinedDrafter(network)
    network_policy = fixed_cost_policy(network)
    combined_policy = fixed_cost_policy(combined)
    network_cost = 0.0
    combined_cost = 0.0
    for prompt in embedded_prompts()[::8]:
        messages = prompt.messages
        alone = dm.generate(target, network, messages, max_tokens=64, policy=network_policy)
        both = dm.generate(target, combined, messages, max_tokens=64, policy=combined_policy)
        assert both.tokens == alone.tokens
        network_cost += cost(alone, DRAFT_COST)
        combined_cost += cost(both, DRAFT_COST)  # too much: the lookup's drafts cost nothing
    assert network_cost >= 0.97 * combined_cost
