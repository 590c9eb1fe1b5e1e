"""Every family, requests of every kind in one forward, whoever comes and goes: the texts alone.

A sample runs with the other tests: every family, and every p. All of it, families x 1, 3 and 8
requests x four drafters, several schedules each, takes minutes:

    pytest -m matrix tests/test_engine_families.py
"""

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from crowd import Crowd, Played
from families import FAMILIES, random_model, random_prompt, target_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_mlx.engine.batch import SharedBatch
from dflash_mlx.errors import SettingsError
from dflash_mlx.structured import Grammar, GrammarTokens

LENGTH = 12
RIGHT = (0.0, 0.5, 0.85, 1.0)  # how often a drafter's slots are


@functools.cache
def letters() -> GrammarTokens:
    """The families' tokens, a byte each, as a grammar knows them."""
    alphabet = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.decoder = decoders.ByteLevel()
    wrapped = SimpleNamespace(backend_tokenizer=bytewise, eos_token_ids={0})
    tokens: Any = SimpleNamespace(tokenizer=wrapped, vocab_size=len(alphabet))
    return GrammarTokens(tokens)


def by_turns() -> list[Grammar]:
    """A letter of the first eight, one of the others, and so on."""
    return [Grammar(letters(), letters().of_lark("start: (/[a-h]/ /[i-z]/)+"))]


# Windows are 32 rows: a prompt that is longer, one that wraps them, and a short one.
KINDS: tuple[tuple[int, dict[str, Any]], ...] = (
    (38, {}),
    (26, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2}),
    (5, {"kv_bits": 8}),
    (30, {"temperature": 1.0, "seed": 8, "top_p": 0.9}),
    (33, {"frequency_penalty": 0.3}),
    (12, {"temperature": 0.7, "seed": 1, "logit_bias": {4: 1.0}}),
    (28, {"temperature": 0.9, "seed": 2, "min_p": 0.05, "logits_processors": by_turns}),
    (2, {"block_size": 3}),
)


@functools.cache
def model(family: str) -> tuple[Any, SharedBatch]:
    target = target_of(random_model(family), family)
    return target, SharedBatch(target, None)


@functools.cache
def alone(family: str, kind: int) -> Crowd:
    """One request of a kind, and its text."""
    (length, ways), (target, _) = KINDS[kind], model(family)
    try:
        target.start((), ways.get("kv_bits"))
    except SettingsError:  # caches that cannot be quantized
        ways = {}
    return Crowd(target, [(random_prompt(length, kind), {"max_tokens": LENGTH, **ways})])


# What happens before each step: who comes, who is cancelled, who gives way to the others.
HAPPENINGS = ("comes",) * 4 + ("nothing",) * 3 + ("gives way",) * 4 + ("cancelled",)
STEPS = 12


def play(family: str, count: int, p: float, seed: int) -> None:
    """Requests that come, go and give way as luck has it; their texts against those alone."""
    luck, (target, together) = random.Random(f"{family} {count} {p} {seed}"), model(family)
    kinds = random.Random(f"{family} {seed}").sample(range(len(KINDS)), count)
    people = Crowd.of([alone(family, kind) for kind in kinds])
    drafter = people.knowing(p, taps=(0, target.num_layers - 1))
    drafter.branches = luck.random() < 0.5 and target.supports_trees
    played = Played(target, drafter, together, stall=1e-9)  # prompts in chunks of 16
    jobs, waiting = {}, list(range(count))
    for _ in range(STEPS):
        what, who = luck.choice(HAPPENINGS), luck.randrange(count)
        if what == "comes" and waiting:
            number = waiting.pop(who % len(waiting))
            prompt, ways = people.requests[number]
            jobs[number] = played.submit(prompt, **{"block_size": 6, **ways})
        elif what == "gives way" and played.scheduler._running:
            played.scheduler.preempt()
        elif what == "cancelled" and who in jobs:
            jobs[who].cancel()
        played.scheduler.step()
    for number in waiting:
        prompt, ways = people.requests[number]
        jobs[number] = played.submit(prompt, **{"block_size": 6, **ways})
    played.run()
    for number, job in jobs.items():
        result, text = job.result(0), people.alone[number]
        whole = len(text) if result.finish_reason == "length" else len(result.tokens)
        assert result.tokens == text[:whole], (number, result.finish_reason)
        assert result.finish_reason == "length" or job.cancelled


SCHEDULES = st.integers(0, 2**32 - 1)
# Of every family two drafters with three requests, and one of four with one request or with eight.
SAMPLE = [
    *((family, 3, RIGHT[(at + more) % 4]) for at, family in enumerate(FAMILIES) for more in (0, 2)),
    *((family, 1, RIGHT[at % 4]) for at, family in enumerate(FAMILIES[1::4])),
    *((family, 8, RIGHT[at % 4]) for at, family in enumerate(FAMILIES[:16:4])),
]


@pytest.mark.parametrize(("family", "count", "p"), SAMPLE)
@settings(max_examples=1)
@given(seed=SCHEDULES)
def test_texts_are_those_alone(family, count, p, seed):
    play(family, count, p, seed)


@pytest.mark.matrix
@pytest.mark.by_family
@pytest.mark.parametrize("p", RIGHT)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5)
@given(seed=SCHEDULES)
def test_all_texts_are_those_alone(family, count, p, seed):
    play(family, count, p, seed)
