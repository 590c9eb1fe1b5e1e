"""Every family, requests of every kind in one forward, whoever comes and goes: the texts alone."""

import functools
import random
from typing import Any

import pytest
from crowd import Crowd, Played
from families import FAMILIES, random_model, random_prompt, target_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.engine.together import Flat
from dflash_mlx.errors import SettingsError

LENGTH = 12
# Windows are 32 rows: a prompt that is longer, one that wraps them, and a short one.
KINDS: tuple[tuple[int, dict[str, Any]], ...] = (
    (38, {}),
    (26, {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2}),
    (5, {"kv_bits": 8}),
    (30, {"temperature": 1.0, "seed": 8, "top_p": 0.9}),
    (33, {"frequency_penalty": 0.3}),
    (12, {"temperature": 0.7, "seed": 1, "logit_bias": {4: 1.0}}),
    (28, {"temperature": 0.9, "seed": 2, "min_p": 0.05}),
    (2, {"block_size": 3}),
)


@functools.cache
def crowd(family: str, count: int) -> tuple[Crowd, Flat]:
    target = target_of(random_model(family), family)
    requests = []
    for seed, (length, ways) in enumerate(KINDS[:count]):
        try:
            target.start((), ways.get("kv_bits"))
        except SettingsError:  # caches that cannot be quantized
            ways = {}
        requests.append((random_prompt(length, seed), {"max_tokens": LENGTH, **ways}))
    return Crowd(target, requests), Flat(target, None)


# What happens before each step: who comes, who is cancelled, who gives way to the others.
HAPPENINGS = ("comes",) * 4 + ("nothing",) * 3 + ("gives way",) * 4 + ("cancelled",)
STEPS = 12


def play(family: str, count: int, seed: int) -> None:
    """Requests that come, go and give way as luck has it; their texts against those alone."""
    people, together = crowd(family, count)
    luck = random.Random(f"{family} {seed}")
    p = luck.choice((0.0, 0.5, 0.85, 1.0))
    drafter = people.knowing(p, taps=(0, people.target.num_layers - 1))
    drafter.branches = luck.random() < 0.5 and people.target.supports_trees
    played = Played(people.target, drafter, together, stall=1e-9)  # prompts in chunks of 16
    jobs, waiting = {}, list(range(count))
    for _ in range(STEPS):
        what, who = luck.choice(HAPPENINGS), luck.randrange(count)
        if what == "comes" and waiting:
            number = waiting.pop(who % len(waiting))
            prompt, ways = people.requests[number]
            jobs[number] = played.submit(prompt, **{"block_size": 6, **ways})
        elif what == "gives way" and played.seats._seats:
            played.seats.give_way()
        elif what == "cancelled" and who in jobs:
            jobs[who].cancel()
        played.seats.step()
    for number in waiting:
        prompt, ways = people.requests[number]
        jobs[number] = played.submit(prompt, **{"block_size": 6, **ways})
    played.run()
    for number, job in jobs.items():
        result, alone = job.result(0), people.alone[number]
        whole = len(alone) if result.finish_reason == "length" else len(result.tokens)
        assert result.tokens == alone[:whole], (number, result.finish_reason)
        assert result.finish_reason == "length" or job.cancelled


SCHEDULES = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=2)
@given(seed=SCHEDULES)
def test_three_requests(family, seed):
    play(family, 3, seed)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_5"])
@settings(max_examples=1)
@given(seed=SCHEDULES)
def test_eight_requests(family, seed):
    play(family, 8, seed)
