"""Trees in the loop: the text does not depend on their size, and the policy picks a fast size."""

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
    """A policy whose costs of a further row, in chains and in trees, are given in plain steps."""
    return policy_with_costs(BLOCK, chain, trees=True, tree=tree)


def decode(drafter=DRAFTER, temperature: float = 0.0, **settings):
    settings = {"block_size": BLOCK, "max_tokens": TOKENS, "seed": 5} | settings
    return generate(TARGET, drafter, PROMPT, temperature=temperature, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
def test_the_text_is_the_plain_one_for_any_tree_budget(temperature):
    plain = decode(None, temperature).tokens
    for budget in (2, 8, 64):
        result = decode(temperature=temperature, tree_budget=budget)
        assert result.tokens == plain
        assert 2 <= max(result.stats.widths) <= budget
        assert budget == 2 or result.stats.trees  # a tree of two rows is a chain
    automatic = decode(temperature=temperature, policy=policy(), tree_budget="auto")
    assert automatic.tokens == plain and automatic.stats.trees


def test_a_larger_tree_needs_fewer_steps_and_none_more_than_a_chain_of_as_many_rows():
    """The drafter has the target's probabilities and the noise of its choices."""

    def steps(**settings) -> int:
        results = [decode(temperature=1.0, seed=seed, **settings) for seed in range(8)]
        return sum(result.stats.rounds for result in results)

    assert steps(tree_budget=64) < steps(tree_budget=16) < steps(tree_budget=BLOCK) <= steps()


def test_the_policy_drafts_large_trees_where_rows_cost_nothing():
    stats = decode(policy=policy(tree=0.0), tree_budget="auto").stats
    assert max(stats.trees) > 48 and sum(stats.trees.values()) > 0.8 * stats.rounds


def test_the_size_of_trees_follows_the_costs_of_rows():
    """Cheap rows: large trees; expensive ones: small trees, then chains, then plain steps."""
    cheap = decode(policy=policy(tree=0.01), block_size=None).stats  # trees by default
    expensive = decode(policy=policy(chain=0.1, tree=0.1), tree_budget="auto").stats
    assert cheap.trees
    rows_of_cheap = cheap.drafted_tokens / cheap.rounds
    rows_of_expensive = expensive.drafted_tokens / expensive.rounds
    assert rows_of_expensive < rows_of_cheap
    chains = decode(policy=policy(chain=0.0, tree=1.0), tree_budget="auto").stats
    assert sum(chains.trees.values()) < 0.2 * chains.rounds
    assert chains.widths[BLOCK] > 0.7 * chains.rounds
    plain = decode(policy=policy(chain=3.0, tree=3.0), tree_budget="auto").stats
    assert plain.widths[1] > 0.8 * plain.rounds


def test_trees_of_a_fixed_size_are_at_most_as_deep_as_a_block():
    stats = decode(tree_budget=16, block_size=4).stats
    assert max(stats.accepted_per_round) < 4 < max(stats.trees)


def test_a_tree_budget_is_refused_where_the_drafter_or_the_policy_has_no_trees():
    oracle = Oracle(PROMPT, decode(None).tokens, VOCABULARY)
    with pytest.raises(SettingsError, match="tree_budget needs a drafter that drafts trees"):
        decode(oracle, tree_budget=16)
    with pytest.raises(SettingsError, match="tree_budget"):
        decode(None, tree_budget=16)
    with pytest.raises(SettingsError, match="trees=True"):
        decode(policy=DraftPolicy(BLOCK), tree_budget="auto")


def test_a_target_without_trees_refuses_a_budget_and_gets_chains_from_a_policy():
    class TargetWithoutTrees(BigramTarget):
        supports_trees = False

        def check_trees(self):
            raise UnsupportedTreeError("bigrams: draft chains.")

    target = TargetWithoutTrees(TABLE)
    settings = {"max_tokens": 20, "block_size": BLOCK}
    with pytest.raises(UnsupportedTreeError):
        generate(target, DRAFTER, PROMPT, tree_budget=16, **settings)
    assert DraftPolicy.of(target, DRAFTER, trees=True).trees is None
    automatic = generate(target, DRAFTER, PROMPT, tree_budget="auto", **settings)
    assert automatic.tokens == decode(None, max_tokens=20).tokens
    assert not automatic.stats.trees
