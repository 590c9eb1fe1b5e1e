"""Trees on the embedded pair: its text at any temperature, and more of it in a round."""

import pytest

import dflash_mlx as dm
from dflash_mlx.bench.datasets import embedded_prompts, limit_per_category
from dflash_mlx.loop import generate

TOKENS = 40


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["tiny", "tiny-dflash2"])
def test_the_text_is_the_plain_one_with_any_tree(drafter, temperature):
    target, network = dm.load("tiny", drafter)
    prompts = limit_per_category(embedded_prompts(), 1)[:3]
    for seed, (prompt, budget) in enumerate(zip(prompts, (8, 16, 64), strict=True)):
        settings = {"temperature": temperature, "seed": seed, "max_tokens": TOKENS}
        asked = list(prompt.messages)
        plain = generate(target, None, asked, **settings)
        drafted = generate(target, network, asked, tree_budget=budget, **settings)
        assert drafted.tokens == plain.tokens and drafted.stats.trees
        assert drafted.stats.rounds < len(drafted.tokens) / 3


def test_a_larger_tree_needs_no_more_rounds():
    """Of many prompts: a tree of 16 rows gives the end of a chain away, which one may need."""
    target, drafter = dm.load("tiny")
    asked = [list(one.messages) for one in limit_per_category(embedded_prompts(), 3)]

    def rounds_of(**way: int) -> int:
        answers = (generate(target, drafter, one, max_tokens=TOKENS, **way) for one in asked)
        return sum(answer.stats.rounds for answer in answers)

    rounds = [rounds_of(), rounds_of(tree_budget=16), rounds_of(tree_budget=64)]
    assert rounds == sorted(rounds, reverse=True) and rounds[2] < rounds[0]
