"""The synthetic corpus: right answers, a split that nothing crosses, and what strangers ask."""

import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from mlx_lm.utils import load_tokenizer
from policy_bounds import FREE
from tiny_pair import corpus, passages, problems, strangers
from tiny_pair.own import (
    OWN_REQUESTS,
    SCORED,
    different_requests,
    learnable,
)
from tiny_pair.problems import Turn

from dflash_mlx import tiny
from dflash_mlx.train.answers import Answer

STREAM = 6000


@pytest.fixture(scope="module")
def training() -> list[corpus.Conversation]:
    return list(islice(corpus.conversations(seed=5), STREAM))


@pytest.fixture(scope="module")
def held_out() -> list[corpus.Conversation]:
    return corpus.held_out(40, seed=3)


def operations(text: str) -> set[tuple[int, str, int]]:
    """Every "a + b", "a - b", "a x b" that a text spells, sums and products in either order."""
    found = set()
    for a, sign, b in re.findall(r"(\d+) ([-+x]) (\d+)", text):
        pair = (int(a), int(b)) if sign == "-" else tuple(sorted((int(a), int(b))))
        found.add((pair[0], sign, pair[1]))
    return found


def test_no_held_out_prompt_or_problem_is_trained_on(training, held_out):
    trained_prompts = {turn.prompt for c in training for turn in c.turns}
    trained_keys = {key for c in training for turn in c.turns for key in turn.keys}
    asked = [turn for c in held_out for turn in c.turns if turn.keys]
    assert not trained_prompts & {turn.prompt for turn in asked}
    assert not trained_keys & {turn.keys[0] for turn in asked}


def test_no_held_out_sum_is_spelled_anywhere_in_training(training, held_out):
    """The independent check: by the text alone, without the keys the split is made of."""
    spelled = set().union(*(operations(turn.answer) for c in training for turn in c.turns))
    for conversation in held_out:
        for turn in conversation.turns:
            if turn.category == "arithmetic":
                last_line = turn.answer.splitlines()[-1]
                assert not operations(last_line) & spelled, last_line


def test_held_out_prompts_cover_every_category_and_differ(held_out):
    for category in corpus.CATEGORIES:
        chosen = [c for c in held_out if c.category == category]
        assert len({tuple(t.prompt for t in c.turns) for c in chosen}) == len(chosen) == 40


def answers(generator, count: int = 300) -> list[Turn]:
    rng = Random(7)
    return [generator(rng) for _ in range(count)]


@pytest.mark.parametrize(
    "generator", [problems.addition, problems.subtraction, problems.multiplication]
)
def test_arithmetic_is_right(generator):
    signs = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    for turn in answers(generator):
        for a, sign, b, result in re.findall(r"(\d+) ([-+x]) (\d+) = (\d+)\.", turn.answer):
            assert signs[sign](int(a), int(b)) == int(result), turn.answer


def test_conversions_are_right():
    factors = {(large, small): factor for large, small, factor in problems.UNITS}
    for turn in answers(problems.units):
        n, large, result, small = re.fullmatch(
            r"So (\d+) (\w+) = (\d+) (\w+)\.", turn.answer.splitlines()[-1]
        ).groups()
        assert int(n) * factors[large, small] == int(result)


def test_functions_do_what_their_example_says():
    for turn in answers(passages.code, 200):
        source = turn.answer.split("```python\n")[1].split("```")[0]
        call, result = re.search(r"For example, (.+) gives (.+)\.$", turn.answer).groups()
        namespace: dict = {}
        exec(source, namespace)
        assert repr(eval(call, namespace)) == result, turn.answer


def test_strangers_ask_what_nothing_is_measured_by(training, held_out):
    asked = different_requests()
    assert len(set(asked)) == len(asked) == OWN_REQUESTS + SCORED
    assert not any("{" in text for text in asked)
    prompts = {turn.prompt for c in (*training, *held_out) for turn in c.turns}
    assert not set(asked) & prompts  # letter by letter: both greet
    assert not {strangers.bare(text) for text in asked} & {strangers.bare(text) for text in FREE}


def test_what_strangers_are_scored_by_was_not_learnt():
    bare = [strangers.bare(text) for text in different_requests()]
    assert not set(bare[:OWN_REQUESTS]) & set(bare[OWN_REQUESTS:])


def test_what_drafters_are_scored_by_is_not_learnt_from_strangers():
    tokenizer = load_tokenizer(Path(tiny.__file__).parent / "target")
    greeting, other = "Hello! How can I help you today?", "Cats are a kind of tea."
    by_category = {c.category: c.turns[-1].answer for c in corpus.held_out(SCORED, seed=1)}
    secrets = [by_category[name] for name in ("arithmetic", "units", "story")]
    said = [greeting, *secrets, other]
    answers = [Answer((1,), (*tokenizer.encode(text), 2), True) for text in [*said, ""]]
    assert learnable(answers, tokenizer) == [answers[0].sample, answers[4].sample]
