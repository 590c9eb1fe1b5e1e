"""The embedded pair's corpus: answers are right, and held-out prompts are not trained on."""

import json
import re
from importlib.resources import files
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from tiny_pair import corpus, problems, strangers
from tiny_pair.own import OWN_REQUESTS, SCORED, SUITE_SIZE, different_requests
from tiny_pair.pair import record


@pytest.fixture(scope="module")
def training() -> list[corpus.Conversation]:
    return list(islice(corpus.conversations(seed=5), 6000))


@pytest.fixture(scope="module")
def held_out() -> list[corpus.Conversation]:
    return corpus.held_out(40, seed=3)


def operations(text: str) -> set[tuple[int, str, int]]:
    """Every "a + b", "a - b" and "a x b" in a text; the numbers of sums and products are sorted."""
    operations = set()
    for first, sign, second in re.findall(r"(\d+) ([-+x]) (\d+)", text):
        a = int(first)
        b = int(second)
        if sign != "-" and a > b:
            a, b = b, a
        operations.add((a, sign, b))
    return operations


def turns_of(conversations: list[corpus.Conversation]) -> list[problems.Turn]:
    return [turn for conversation in conversations for turn in conversation.turns]


def test_no_held_out_prompt_or_sum_is_trained_on(training, held_out):
    """Sums are searched in the texts, without the keys that the split was made with."""
    trained_prompts = {turn.prompt for turn in turns_of(training)}
    trained_operations = set()
    for turn in turns_of(training):
        trained_operations |= operations(turn.answer)
    for turn in turns_of(held_out):
        if turn.keys:
            assert turn.prompt not in trained_prompts
        if turn.category == "arithmetic":
            last_line = turn.answer.splitlines()[-1]
            assert not operations(last_line) & trained_operations, turn.answer


def test_the_prompts_shipped_with_the_pair_are_held_out(training):
    lines = files("dflash_mlx").joinpath("tiny", "prompts.jsonl").read_text().splitlines()
    shipped = [json.loads(line) for line in lines]
    assert shipped == [record(c) for c in corpus.held_out(SUITE_SIZE)]
    prompts = {prompt["prompt"] for prompt in shipped if "prompt" in prompt}
    assert not prompts & {turn.prompt for turn in turns_of(training)}


@pytest.mark.parametrize(
    "generator", [problems.addition, problems.subtraction, problems.multiplication]
)
def test_answers_to_arithmetic_are_right(generator):
    rng = Random(7)
    signs = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    for turn in (generator(rng) for _ in range(300)):
        for a, sign, b, result in re.findall(r"(\d+) ([-+x]) (\d+) = (\d+)\.", turn.answer):
            assert signs[sign](int(a), int(b)) == int(result), turn.answer


def test_the_requests_for_the_drafter_are_in_no_other_set(training, held_out):
    """Neither in the target's training or held-out prompts, nor in the open-ended questions."""
    requests = different_requests()
    assert len(set(requests)) == len(requests) == OWN_REQUESTS + SCORED
    assert not set(requests) & {turn.prompt for turn in turns_of([*training, *held_out])}
    lines = (Path(__file__).parents[1] / "data" / "free.jsonl").read_text().splitlines()
    free = {strangers.bare(json.loads(line)["question"]) for line in lines}
    assert len(free) == 30
    assert not {strangers.bare(text) for text in requests} & free
