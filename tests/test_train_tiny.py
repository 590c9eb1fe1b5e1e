"""The embedded pair is the one its recipe makes, and its prompts were never trained on."""

import json
from importlib.resources import files
from itertools import islice

import pytest
from tiny_pair import corpus
from tiny_pair.pair import (
    DFLASH2_CONFIG,
    DRAFTER_CONFIG,
    SUITE_SIZE,
    TARGET_CONFIG,
    record,
)

PAIR = files("dflash_mlx").joinpath("tiny")


@pytest.mark.parametrize(
    ("part", "config"),
    [("target", TARGET_CONFIG), ("drafter", DRAFTER_CONFIG), ("dflash2", DFLASH2_CONFIG)],
)
def test_its_shapes_are_the_recipes(part, config):
    assert json.loads(PAIR.joinpath(part, "config.json").read_text()) == config


def test_its_prompts_are_the_held_out_ones():
    shipped = [json.loads(line) for line in PAIR.joinpath("prompts.jsonl").read_text().splitlines()]
    assert shipped == [record(c) for c in corpus.held_out(SUITE_SIZE)]
    asked = {prompt["prompt"] for prompt in shipped if "prompt" in prompt}
    training = islice(corpus.conversations(seed=9), 20_000)
    assert not asked & {turn.prompt for c in training for turn in c.turns}
