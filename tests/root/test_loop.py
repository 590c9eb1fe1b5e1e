"""The loop: whatever is drafted, the tokens are those of mlx-lm's greedy decoding."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from oracle import Oracle
from simulated import policy_with_costs
from tinymodels import SUPPORTED, ending_at, greedy, random_drafter, target, tokenizer

import dflash_mlx as dm
from dflash_mlx.events import Result
from dflash_mlx.generation import DEFAULT_BLOCK_SIZE
from dflash_mlx.loop import generate, stream_generate
from dflash_mlx.targets.session import LAST_STEP, longest_step

PROMPT = tokenizer().encode("what is 37 + 48?")
LENGTH = 40
VOCABULARY = len(tokenizer())


def oracle(answer: list[int], p: float = 1.0, prompt: list[int] = PROMPT, **options) -> Oracle:
    return Oracle(prompt, answer=answer, vocab_size=VOCABULARY, p=p, **options)


def decoded(tokens: list[int]) -> str:
    """mlx-lm's text of these tokens, without an incomplete character at the end."""
    detokenizer = target().tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    complete = detokenizer.text
    detokenizer.finalize()  # adds what was held back: spaces, or U+FFFD for a torn character
    return complete + detokenizer.text[len(complete) :].rstrip("\ufffd")


def check(result: Result, tokens: list[int], prompt: list[int] = PROMPT) -> None:
    """Check the tokens and statistics of a result that reached `max_tokens`.

    The prefill makes the first token; every later one belongs to a round.
    """
    assert result.tokens == tokens
    assert result.text == decoded(tokens)
    assert result.finish_reason == "length"
    stats = result.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (len(prompt), len(tokens))
    assert stats.accepted_tokens == sum(stats.accepted_per_round)
    assert stats.rounds == len(stats.accepted_per_round)
    assert stats.rounds + stats.accepted_tokens == stats.round_tokens == max(0, len(tokens) - 1)


def drafters(answer: list[int]) -> dict[str, Any]:
    return {
        "plain": None,
        "never right": oracle(answer, 0.0),
        "right half the time": oracle(answer, 0.5),
        "right nine times in ten": oracle(answer, 0.9, tap_layers=(0, 2)),
        "always right": oracle(answer, 1.0),
        "a random network": random_drafter(),
    }


@pytest.mark.parametrize("family", SUPPORTED)
@pytest.mark.parametrize("bits", [None, 4])
def test_drafted_tokens_are_those_of_mlx_lm(family, bits):
    model = target(family, bits)
    answer = greedy(model, PROMPT, LENGTH)
    assert len(set(answer)) > 8, "the text repeats itself, so it is too easy to draft"
    for name, drafter in drafters(answer).items():
        result = generate(model, drafter, PROMPT, max_tokens=LENGTH)
        check(result, answer)
        if name == "always right":
            assert result.stats.rounds == math.ceil((LENGTH - 1) / DEFAULT_BLOCK_SIZE)
        if name in ("plain", "never right"):
            assert result.stats.rounds == LENGTH - 1


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16])
def test_every_block_size_gives_the_same_tokens(block_size):
    answer = greedy(target(), PROMPT, LENGTH)
    drafter = oracle(answer, 0.8, seed=block_size)
    check(generate(target(), drafter, PROMPT, max_tokens=LENGTH, block_size=block_size), answer)
    assert max(drafter.widths) <= block_size
    drafter = random_drafter()
    check(generate(target(), drafter, PROMPT, max_tokens=9, block_size=block_size), answer[:9])


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 16, 17, 33])
@pytest.mark.parametrize("p", [None, 0.9])
def test_max_tokens_is_exact(max_tokens, p):
    answer = greedy(target(), PROMPT, LENGTH)
    drafter = None if p is None else oracle(answer, p)
    result = generate(target(), drafter, PROMPT, max_tokens=max_tokens)
    check(result, answer[:max_tokens])
    if drafter is not None:  # no row is verified whose token could not be emitted
        assert all(width < max_tokens for width in drafter.widths)


@pytest.mark.parametrize("extra_tokens", [LAST_STEP + 1, LAST_STEP + 40])
def test_prompts_longer_than_a_prefill_step(extra_tokens):
    """They are read in three forwards, the last of which has `LAST_STEP` tokens."""
    length = longest_step() + extra_tokens
    model = target("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    prompt = [(i * i + 3) % VOCABULARY for i in range(length)]
    answer = greedy(model, prompt, 12, prefill_step_size=500)
    drafter = oracle(answer, 0.7, prompt, tap_layers=(0,))
    check(generate(model, drafter, prompt, max_tokens=12), answer, prompt)
    steps = [taps.shape[1] for taps in drafter.taps]
    assert sum(steps[:2]) == length - LAST_STEP
    assert steps[2] == LAST_STEP


def test_the_context_length_limits_the_answer():
    model = target(max_position_embeddings=len(PROMPT) + 20)
    answer = greedy(model, PROMPT, 20)
    check(generate(model, oracle(answer, 1.0), PROMPT, max_tokens=1000), answer)


def test_the_drafter_gets_the_features_of_every_committed_token():
    """They equal those of one forward over the whole text."""
    answer = greedy(target(), PROMPT, LENGTH)
    layers = (2, 0)
    drafter = oracle(answer, 0.7, tap_layers=layers)
    generate(target(), drafter, PROMPT, max_tokens=LENGTH)
    features = mx.concatenate(drafter.taps, axis=1)
    _, expected = target().features(mx.array([[*PROMPT, *answer]]), layers)
    tokens = features.shape[1]
    assert tokens >= len(PROMPT) + LENGTH - 1
    assert mx.allclose(features, expected[:, :tokens], rtol=1e-4, atol=1e-4)


# Where the text ends


def first_occurrences(answer: list[int]) -> list[int]:
    """Indices of tokens that the answer does not have before: each of them can serve as EOS."""
    return [index for index, token in enumerate(answer) if token not in answer[:index]]


@pytest.mark.parametrize("p", [None, 0.9])
def test_eos_anywhere_in_a_block_ends_the_answer(p):
    answer = greedy(target(), PROMPT, LENGTH)
    assert any(index % 16 not in (0, 15) for index in first_occurrences(answer))
    for end in first_occurrences(answer)[::3]:
        model = ending_at(target(), answer[end])
        drafter = None if p is None else oracle(answer, p)
        result = generate(model, drafter, PROMPT, max_tokens=LENGTH)
        assert result.tokens == answer[: end + 1] == greedy(model, PROMPT, LENGTH)
        assert result.text == decoded(answer[:end])
        assert result.finish_reason == "stop"
        assert result.stats.output_tokens == end + 1


def test_eos_as_the_first_token():
    answer = greedy(target(), PROMPT, 1)
    result = generate(ending_at(target(), *answer), oracle(answer), PROMPT, max_tokens=9)
    assert (result.text, result.tokens, result.finish_reason) == ("", answer, "stop")


def test_drafted_tokens_after_the_end_do_not_count():
    answer = greedy(target(), PROMPT, LENGTH)
    inside_the_first_block = range(2, 15)
    end = next(index for index in first_occurrences(answer) if index in inside_the_first_block)
    model = ending_at(target(), answer[end])
    first, event = stream_generate(model, oracle(answer), PROMPT, max_tokens=LENGTH)
    assert [*first.tokens, *event.tokens] == answer[: end + 1]
    assert event.drafted == 15
    assert event.accepted == event.stats.accepted_tokens == end
    assert event.stats.accepted_per_round == [end]


def substrings(text: str) -> list[str]:
    """Substrings of a text, of one to five characters, none of them with a torn character."""
    parts = []
    for length in (1, 2, 3, 5):
        for start in range(0, len(text) - length, 7):
            parts.append(text[start : start + length])
    return [part for part in parts if "\ufffd" not in part]


@pytest.mark.parametrize("p", [None, 1.0])
def test_a_stop_string_anywhere_in_a_block_ends_the_answer(p):
    answer = greedy(target(), PROMPT, LENGTH)
    text = decoded(answer)
    assert len(substrings(text)) > 10
    for stop in substrings(text):
        drafter = None if p is None else oracle(answer, p)
        result = generate(target(), drafter, PROMPT, max_tokens=LENGTH, stop=stop)
        assert (result.text, result.finish_reason) == (text[: text.find(stop)], "stop")
        assert result.tokens == answer[: len(result.tokens)]
        assert stop in decoded(result.tokens)


# Events and counters


def drafted_per_round(accepted: list[int], block_size: int) -> list[int]:
    """How many tokens each round drafts if it accepts so many: a block, or what remains."""
    remaining = sum(accepted) + len(accepted)
    drafted = []
    for count in accepted:
        drafted.append(min(block_size, remaining) - 1)
        remaining -= count + 1
    return drafted


@pytest.mark.parametrize(
    ("accepted", "block_size"),
    [([3, 0, 7, 0, 1, 7], 8), ([0, 0, 0], 16), ([15, 15], 16), ([1, 0], 2)],
)
def test_events_and_stats_are_exact(accepted, block_size):
    """`accepted` says how many drafts are right in each round."""
    emitted = [count + 1 for count in accepted]
    drafted = drafted_per_round(accepted, block_size)
    length = 1 + sum(emitted)
    answer = greedy(target(), PROMPT, length)
    drafter = oracle(answer, script=accepted)
    settings = {"max_tokens": length, "block_size": block_size}
    events = list(stream_generate(target(), drafter, PROMPT, **settings))
    assert [event.accepted for event in events] == [0, *accepted]
    assert [event.drafted for event in events] == [0, *drafted]
    assert [len(event.tokens) for event in events] == [1, *emitted]
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert [token for event in events for token in event.tokens] == answer
    assert "".join(event.text for event in events) == decoded(answer)
    stats = events[-1].stats
    assert (stats.rounds, stats.drafted_tokens) == (len(accepted), sum(drafted))
    assert stats.accepted_per_round == accepted and stats.block_size == block_size
    assert stats.acceptance_length == sum(emitted) / len(accepted)
    assert stats.acceptance_rate == sum(accepted) / sum(drafted)
    assert stats.tokens_per_second == sum(emitted) / stats.decode_seconds
    assert stats.first_token_seconds == stats.prefill_seconds > 0 and stats.peak_bytes > 0
    assert 0 < stats.first_round_seconds <= stats.decode_seconds


def test_plain_decoding_drafts_nothing():
    stats = generate(target(), None, PROMPT, max_tokens=5).stats
    assert (stats.block_size, stats.drafted_tokens, stats.accepted_tokens) == (1, 0, 0)
    assert (stats.rounds, stats.acceptance_length, stats.acceptance_rate) == (4, 1.0, 0.0)


def test_max_tokens_of_zero_runs_no_forward():
    drafter = oracle([])
    (event,) = stream_generate(target(), drafter, PROMPT, max_tokens=0)
    assert (event.text, event.tokens, event.finish_reason) == ("", [], "length")
    assert event.stats.tokens_per_second == event.stats.acceptance_length == 0.0
    assert not drafter.taps and not drafter.widths


DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 8,
    "selector_top_k": 5,
}


def test_a_round_waits_for_the_device_once(monkeypatch):
    """Each round has one `mx.eval`. Other calls that may wait only read what it computed."""
    calls = []

    def recording(name: str, call: Callable) -> Callable:
        def record(*arguments: Any) -> Any:
            calls.append(name)
            return call(*arguments)

        return record

    for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__array__"):
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, recording(name, getattr(mx.array, name)))
    for name in ("eval", "synchronize"):
        monkeypatch.setattr(mx, name, recording(name, getattr(mx, name)))
    for drafter in (None, random_drafter(), random_drafter(**DFLASH2)):
        events = stream_generate(target(), drafter, PROMPT, max_tokens=8)
        next(events)  # also evaluates the prompt
        calls.clear()
        assert len(list(events)) == 7
        # Plain decoding reads the choices; with a drafter, the drafts are read as well. The last
        # round drafts nothing.
        reads = ["tolist"] if drafter is None else ["tolist", "tolist"]
        assert calls == ["eval", *reads] * 6 + ["eval", "tolist"]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("p", [None, 0.0, 0.5, 0.9, 1.0])
def test_an_automatic_policy_changes_no_token(p, settings):
    plain = generate(target(), None, PROMPT, max_tokens=LENGTH, **settings)
    drafter = None if p is None else oracle(plain.tokens, p)
    result = generate(target(), drafter, PROMPT, max_tokens=LENGTH, policy="auto", **settings)
    assert result.tokens == plain.tokens


@pytest.mark.parametrize(("row", "draft"), [(0.015, 0.1), (0.08, 0.3), (1.0, 2.0)])
def test_a_policy_drafts_less_where_drafts_are_never_right(row, draft):
    """It drafts less than half as much as fixed blocks, whether rows are cheap or expensive.

    `row` and `draft` are the costs of a further row and of a draft, as parts of a plain step.
    """
    length = 3 * LENGTH
    answer = greedy(target(), PROMPT, length)

    def drafted_tokens(policy: Any) -> int:
        never_right = oracle(answer, 0.0)
        result = generate(target(), never_right, PROMPT, max_tokens=length, policy=policy)
        assert result.tokens == answer
        return result.stats.drafted_tokens

    policy = policy_with_costs(DEFAULT_BLOCK_SIZE, row, draft)
    assert drafted_tokens(policy) < drafted_tokens(None) / 2


def test_requests_of_an_engine_share_its_automatic_policy():
    answer = greedy(target(), PROMPT, LENGTH)
    with dm.Engine(target(), random_drafter(), policy="auto") as engine:
        jobs = [engine.submit(PROMPT, max_tokens=LENGTH) for _ in range(3)]
        assert [job.result().tokens for job in jobs] == [answer] * 3
    with dm.Engine(target(), None, policy="auto") as engine:
        assert engine.submit(PROMPT, max_tokens=LENGTH).result().tokens == answer


def test_an_automatic_policy_works_with_trees():
    answer = greedy(target(), PROMPT, LENGTH)
    settings = {"policy": "auto", "tree_budget": "auto", "max_tokens": LENGTH}
    assert generate(target(), random_drafter(), PROMPT, **settings).tokens == answer
