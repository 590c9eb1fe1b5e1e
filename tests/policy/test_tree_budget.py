"""Drafting trees in the loop: the same text whatever their size, and a size that pays."""

import numpy as np
import pytest
from bigrams import BigramTarget, TreeBigrams
from oracle import Oracle
from simulated import policy_with_costs

from dflash_mlx.errors import SettingsError, UnsupportedTreeError
from dflash_mlx.loop import generate
from dflash_mlx.policy.draft_policy import DraftPolicy

VOCABULARY = 24
BLOCK = 6
TOKENS = 120
TABLE = np.random.default_rng(3).normal(size=(VOCABULARY, VOCABULARY)) * 2.5
TARGET = BigramTarget(TABLE)
PROMPT = [1, 2, 3]
DRAFTER = TreeBigrams(TABLE)


def policy(chain: float = 0.05, tree: float = 0.05) -> DraftPolicy:
    """Of a machine where a row more costs this share of a plain step, in chains and in trees."""
    return policy_with_costs(BLOCK, chain, trees=True, tree=tree)


def decode(drafter=DRAFTER, temperature: float = 0.0, **settings):
    settings = {"block_size": BLOCK, "max_tokens": TOKENS, "seed": 5} | settings
    return generate(TARGET, drafter, PROMPT, temperature=temperature, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
def test_the_text_is_the_same_with_any_tree(temperature):
    plain = decode(None, temperature).tokens
    for budget in (2, 8, 64):
        result = decode(temperature=temperature, tree_budget=budget)
        assert result.tokens == plain
        assert 2 <= max(result.stats.widths) <= budget
        assert budget == 2 or result.stats.trees
    free = decode(temperature=temperature, policy=policy(), tree_budget="auto")
    assert free.tokens == plain and free.stats.trees


def test_a_tree_is_no_worse_than_a_chain_of_as_many_rows():
    """The drafter's probabilities are true, and the noise of the target's choice is known."""

    def steps(**settings) -> int:
        results = [decode(temperature=1.0, seed=seed, **settings) for seed in range(8)]
        return sum(result.stats.rounds for result in results)

    assert steps(tree_budget=64) < steps(tree_budget=16) < steps(tree_budget=BLOCK) <= steps()


def test_rows_that_cost_nothing_are_all_used():
    stats = decode(policy=policy(tree=0.0), tree_budget="auto").stats
    assert max(stats.trees) > 48 and sum(stats.trees.values()) > 0.8 * stats.rounds


def test_the_size_follows_the_costs():
    cheap = decode(policy=policy(tree=0.01), block_size=None).stats  # unasked, by the policy
    dear = decode(policy=policy(chain=0.1, tree=0.1), tree_budget="auto").stats
    assert cheap.trees and dear.drafted_tokens / dear.rounds < cheap.drafted_tokens / cheap.rounds
    chains = decode(policy=policy(chain=0.0, tree=1.0), tree_budget="auto").stats
    assert sum(chains.trees.values()) < 0.2 * chains.rounds
    assert chains.widths[BLOCK] > 0.7 * chains.rounds
    nothing = decode(policy=policy(chain=3.0, tree=3.0), tree_budget="auto").stats
    assert nothing.widths[1] > 0.8 * nothing.rounds


def test_trees_of_a_fixed_size_are_as_deep_as_a_block():
    asked = decode(tree_budget=16, block_size=4).stats
    assert max(asked.accepted_per_round) < 4 < max(asked.trees)


def test_trees_of_a_drafter_that_has_none_are_refused_when_asked_for():
    oracle = Oracle(PROMPT, decode(None).tokens, VOCABULARY)
    with pytest.raises(SettingsError, match="tree_budget needs a drafter that drafts trees"):
        decode(oracle, tree_budget=16)
    with pytest.raises(SettingsError, match="tree_budget"):
        decode(None, tree_budget=16)
    with pytest.raises(SettingsError, match="trees=True"):
        decode(policy=DraftPolicy(BLOCK), tree_budget="auto")


def test_a_target_that_reads_no_trees_refuses_them_or_is_given_chains():
    class Chains(BigramTarget):
        supports_trees = False

        def check_trees(self):
            raise UnsupportedTreeError("bigrams: draft chains.")

    target = Chains(TABLE)
    settings = {"max_tokens": 20, "block_size": BLOCK}
    with pytest.raises(UnsupportedTreeError):
        generate(target, DRAFTER, PROMPT, tree_budget=16, **settings)
    assert DraftPolicy.of(target, DRAFTER, trees=True).trees is None
    free = generate(target, DRAFTER, PROMPT, tree_budget="auto", **settings)
    assert free.tokens == decode(None, max_tokens=20).tokens and not free.stats.trees
