"""The embedded pair's corpus: right answers, and a split that nothing crosses."""

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
    """Every "a + b", "a - b", "a x b" that a text spells, sums and products in either order."""
    signs = set()
    for a, sign, b in re.findall(r"(\d+) ([-+x]) (\d+)", text):
        pair = (int(a), int(b)) if sign == "-" else tuple(sorted((int(a), int(b))))
        signs.add((pair[0], sign, pair[1]))
    return signs


def test_no_held_out_prompt_or_sum_is_trained_on(training, held_out):
    """Sums are found in the texts, not by the keys that the split was made with."""
    prompts = {turn.prompt for c in training for turn in c.turns}
    assert not prompts & {turn.prompt for c in held_out for turn in c.turns if turn.keys}
    spelled = set().union(*(operations(turn.answer) for c in training for turn in c.turns))
    for turn in (turn for c in held_out for turn in c.turns if turn.category == "arithmetic"):
        assert not operations(turn.answer.splitlines()[-1]) & spelled, turn.answer


def test_the_pairs_prompts_are_held_out(training):
    lines = files("dflash_mlx").joinpath("tiny", "prompts.jsonl").read_text().splitlines()
    shipped = [json.loads(line) for line in lines]
    assert shipped == [record(c) for c in corpus.held_out(SUITE_SIZE)]
    asked = {prompt["prompt"] for prompt in shipped if "prompt" in prompt}
    assert not asked & {turn.prompt for c in training for turn in c.turns}


@pytest.mark.parametrize(
    "generator", [problems.addition, problems.subtraction, problems.multiplication]
)
def test_arithmetic_is_right(generator):
    rng = Random(7)
    signs = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    for turn in (generator(rng) for _ in range(300)):
        for a, sign, b, result in re.findall(r"(\d+) ([-+x]) (\d+) = (\d+)\.", turn.answer):
            assert signs[sign](int(a), int(b)) == int(result), turn.answer


def test_strangers_requests_are_neither_trained_on_nor_measured_by(training, held_out):
    asked = different_requests()
    assert len(set(asked)) == len(asked) == OWN_REQUESTS + SCORED
    assert not set(asked) & {turn.prompt for c in (*training, *held_out) for turn in c.turns}
    lines = (Path(__file__).parents[1] / "data" / "free.jsonl").read_text().splitlines()
    free = {strangers.bare(json.loads(line)["question"]) for line in lines}
    assert len(free) == 30 and not {strangers.bare(text) for text in asked} & free
