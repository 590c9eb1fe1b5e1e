"""Trees on the embedded pair: its text at any temperature, and more of it in a round."""

from functools import cache

import pytest

import dflash_mlx as dm
from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
from dflash_mlx.loop import generate

PROMPTS = [list(one.messages) for one in limit_per_category(embedded_prompts(), 1)][:4]
TOKENS = 40
BUDGETS = (8, 16, 32, 64)


@cache
def pair(drafter: str):
    return dm.load("tiny", drafter)


def decode(drafter: str, number: int, temperature: float, **settings):
    """The answer to a prompt, drafted by this drafter of the pair, or plain."""
    target, drafts = pair(drafter)
    settings |= {"temperature": temperature, "max_tokens": TOKENS, "seed": number}
    plainly = settings.pop("plain", False)
    return generate(target, None if plainly else drafts, PROMPTS[number], **settings)


@cache
def plain(number: int, temperature: float) -> list[int]:
    return decode("tiny", number, temperature, plain=True).tokens


@pytest.mark.parametrize("temperature", [0.8, 1.3])
def test_the_text_is_the_plain_one_with_any_tree(temperature):
    for number in range(len(PROMPTS)):
        for budget in BUDGETS:
            result = decode("tiny", number, temperature, tree_budget=budget)
            assert result.tokens == plain(number, temperature)
            assert result.stats.rounds < len(result.tokens) / 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_dflash2_drafts_trees_too(temperature):
    for number in range(2):
        result = decode("tiny-dflash2", number, temperature, tree_budget=32)
        assert result.tokens == plain(number, temperature)
        assert result.stats.trees


def test_a_larger_tree_needs_no_more_rounds():
    """Of many prompts: a tree of 16 rows gives the end of a chain away, which one may need."""
    target, drafter = pair("tiny")
    asked = [list(one.messages) for one in limit_per_category(embedded_prompts(), 4)]

    def rounds_of(**way: int) -> int:
        answers = (generate(target, drafter, one, max_tokens=TOKENS, **way) for one in asked)
        return sum(answer.stats.rounds for answer in answers)

    rounds = [rounds_of(), rounds_of(tree_budget=16), rounds_of(tree_budget=64)]
    assert rounds == sorted(rounds, reverse=True) and rounds[2] < rounds[0]
