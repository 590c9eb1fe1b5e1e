"""Drafting trees in the loop: the same text whatever their size, and a size that pays."""

import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget, TreeBigrams, softmax
from oracle import Oracle

from dflash_mlx.drafter.calibration import Calibration
from dflash_mlx.errors import SettingsError, UnsupportedTreeError
from dflash_mlx.loop import generate
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.trees import TreePolicy, tree_policy
from dflash_mlx.policy.widths import Policy

VOCABULARY, BLOCK, TOKENS = 24, 6, 120
TABLE = np.random.default_rng(3).normal(size=(VOCABULARY, VOCABULARY)) * 2.5
TARGET, PROMPT = BigramTarget(TABLE), [1, 2, 3]


DRAFTER = TreeBigrams(TABLE)


def costs(chain: float, tree: float) -> tuple[Costs, Costs]:
    """Of a machine where a row more costs this share of a plain token, in chains and in trees."""
    chains = {row: 1.0 + chain * (row - 1) for row in range(1, BLOCK + 1)}
    trees = {row: 1.0 + tree * (row - 1) for row in (1, 64)}
    draft = {row: 0.1 for row in range(1, BLOCK + 1)}
    whole = {BLOCK: chains[BLOCK] + 0.1}
    return Costs({64: chains}, {64: draft}), Costs({64: trees}, {64: whole})


def policy(chain: float = 0.05, tree: float = 0.05) -> TreePolicy:
    of_chains, of_trees = costs(chain, tree)
    return TreePolicy(believing(of_chains), of_trees)


def believing(of_chains: Costs) -> Policy:
    """A policy that takes such costs at their word: real rounds of bigrams cost other times."""
    chains = Policy(of_chains, BLOCK)
    chains.watch.saw = lambda *_: None
    return chains


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


def test_a_tree_brings_more_than_a_chain_and_a_larger_one_still_more():
    rounds = [decode(temperature=1.0).stats.rounds]
    for budget in (BLOCK, 16, 64):
        rounds.append(decode(temperature=1.0, tree_budget=budget).stats.rounds)
    assert rounds == sorted(rounds, reverse=True) and rounds[-1] < 0.8 * rounds[0]


def test_rows_that_cost_nothing_are_all_used():
    stats = decode(policy=policy(tree=0.0), tree_budget="auto").stats
    assert max(stats.trees) > 48 and sum(stats.trees.values()) > 0.8 * stats.rounds


def test_dear_trees_are_cut_small():
    cheap = decode(policy=policy(tree=0.01), tree_budget="auto").stats
    dear = decode(policy=policy(chain=0.1, tree=0.1), tree_budget="auto").stats
    assert dear.drafted_tokens / dear.rounds < cheap.drafted_tokens / cheap.rounds


def test_where_chains_are_better_they_are_drafted():
    """Trees are tried, found to be no gain, and left alone but for a try now and then."""
    stats = decode(policy=policy(chain=0.0, tree=1.0), tree_budget="auto").stats
    assert not stats.trees  # every tree was cut down to a chain
    assert stats.widths[BLOCK] > 0.9 * stats.rounds


def test_where_nothing_pays_nothing_is_drafted():
    stats = decode(policy=policy(chain=3.0, tree=3.0), tree_budget="auto").stats
    assert stats.widths[1] > 0.8 * stats.rounds


def test_what_a_tree_has_cost_already_does_not_make_a_round_shorter():
    """Rows cost next to nothing and drafts much: once there is a draft, it is verified."""
    of_chains, of_trees = costs(chain=0.02, tree=0.02)
    dear = dict.fromkeys(range(1, BLOCK + 1), 0.5)
    of_chains = Costs(of_chains.verify, {64: dear})
    of_trees = Costs({64: {row: 1.5 + 0.02 * (row - 1) for row in (1, 64)}}, {64: {BLOCK: 1.6}})
    kept = TreePolicy(believing(of_chains), of_trees)
    # The first answer teaches that drafts are right although the target is unsure.
    first, stats = (
        decode(temperature=1.0, policy=kept, tree_budget="auto", seed=seed).stats for seed in (5, 6)
    )
    assert first.trees and first.widths[1] <= 0.5 * first.rounds
    assert stats.trees and stats.widths.get(1, 0) <= 0.2 * stats.rounds


def test_a_tree_that_cannot_be_paid_for_is_not_drafted_for_nothing():
    of_chains, of_trees = costs(0.05, 0.05)
    kept = TreePolicy(believing(of_chains), Costs(of_trees.verify, {64: {BLOCK: 20.0}}))
    result = decode(policy=kept, tree_budget="auto")
    assert max(result.stats.widths) > 1 and not result.stats.trees


def test_decisions_can_be_repeated():
    first, second = (decode(policy=policy(), tree_budget="auto").stats for _ in range(2))
    assert first.widths == second.widths and first.trees == second.trees


def test_a_policy_with_trees_drafts_them_unasked():
    stats = decode(policy=policy(tree=0.0), block_size=None).stats
    assert stats.trees


def test_trees_of_a_fixed_size_are_as_deep_as_a_block():
    """A block size puts no chains in their place, though the command line hands on a policy."""
    asked = decode(tree_budget=16, block_size=4).stats
    handed = decode(policy=TreePolicy.fixed(16), block_size=4).stats
    assert handed.trees == asked.trees and handed.trees
    assert max(handed.accepted_per_round) < 4 < max(handed.trees)


def test_a_policy_explains_itself():
    kept = policy()
    decode(policy=kept, tree_budget="auto")
    lines = "\n".join(kept.describe(64))
    assert "trees:" in lines and "a tree of 32:" in lines


def test_trees_of_a_drafter_that_has_none_are_refused_when_asked_for():
    oracle = Oracle(PROMPT, decode(None).tokens, VOCABULARY)
    with pytest.raises(SettingsError, match="tree_budget needs a drafter that drafts trees"):
        decode(oracle, tree_budget=16)
    with pytest.raises(SettingsError, match="tree_budget"):
        decode(None, tree_budget=16)


@pytest.mark.parametrize("budget", [1, -1, 8.0, True, "many", 1025, 10**30])
def test_a_budget_that_no_tree_can_have_is_refused_at_once(budget):
    """A million rows would want a mask of a million times a million places."""
    with pytest.raises(SettingsError, match="tree_budget must be from 2 to 1024, or"):
        decode(tree_budget=budget)


def test_the_policys_choice_is_a_chain_then():
    chosen = tree_policy(TARGET, BigramDrafter(TABLE))
    assert isinstance(chosen, Policy)
    assert not decode(BigramDrafter(TABLE), tree_budget="auto").stats.trees


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_max_tokens_ends_the_text_inside_a_tree(limit):
    assert decode(max_tokens=limit, tree_budget=64).tokens == decode(None, max_tokens=limit).tokens


def test_a_stop_token_ends_the_text_inside_a_path():
    plain = decode(None).tokens
    ending = plain[10]
    expected = plain[: plain.index(ending) + 1]
    target = BigramTarget(TABLE)
    target.tokenizer.eos_token_ids = (ending,)
    result = generate(target, DRAFTER, PROMPT, max_tokens=TOKENS, tree_budget=64, block_size=BLOCK)
    assert result.tokens == expected and result.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_expectations_are_what_is_really_accepted(temperature):
    """Over many rounds, the sum of the path probabilities is the tokens that were accepted."""
    kept = TreePolicy.fixed(24)
    expected = []

    class Watching(TreeBigrams):
        def propose_tree(self, *arguments):
            tree = super().propose_tree(*arguments)
            expected.append(np.exp(tree.tree.log_probs).sum())
            return tree

    settings = {"policy": kept, "temperature": temperature, "max_tokens": 1500}
    stats = decode(Watching(TABLE), block_size=None, **settings).stats
    late = len(expected) // 3  # when it had been learnt
    brought = [accepted + 1 for accepted in stats.accepted_per_round[late:]]
    assert np.mean(brought) == pytest.approx(np.mean(expected[late:]), rel=0.1)


def test_calibration_finds_the_weights_that_made_the_choices():
    random, truth, kept = np.random.default_rng(0), np.array([2.0, 0.8, 0.0, 0.5]), Calibration()
    true = Calibration()
    true.weights = truth
    for _ in range(400):
        log_q = np.log(softmax(random.normal(size=(8, 12))))[:, :10]  # two are no candidates
        noise = random.gumbel(size=(8, 10))
        p = np.exp(true.log_probs(log_q[:, None], noise))[:, 0]
        p = np.concatenate([p, 1 - p.sum(axis=-1, keepdims=True)], axis=-1)
        kept.learn(log_q, noise, np.array([random.choice(11, p=row / row.sum()) for row in p]))
    estimate = kept.log_probs(log_q[:, None], noise)
    assert np.abs(np.exp(estimate) - np.exp(true.log_probs(log_q[:, None], noise))).max() < 0.08
    assert kept.weights[0] == pytest.approx(truth[0], abs=0.5)


def test_calibration_learns_that_a_drafter_is_always_wrong():
    kept, log_q = Calibration(), np.log(softmax(np.array([[5.0, 1.0, 0.0]] * 4)))
    for _ in range(50):
        kept.learn(log_q, None, np.full(4, 3))
    assert np.exp(kept.log_probs(log_q[:, None], None)).sum(axis=-1).max() < 0.2
    assert np.isfinite(kept.weights).all()


def test_a_target_that_reads_no_trees_refuses_them_or_is_given_chains():
    class Chains(BigramTarget):
        supports_trees = False

        def check_trees(self):
            raise UnsupportedTreeError("bigrams: draft chains.")

    target, settings = Chains(TABLE), {"max_tokens": 20, "block_size": BLOCK}
    with pytest.raises(UnsupportedTreeError):
        generate(target, DRAFTER, PROMPT, tree_budget=16, **settings)
    assert isinstance(tree_policy(target, DRAFTER), Policy)
    free = generate(target, DRAFTER, PROMPT, tree_budget="auto", **settings)
    assert free.tokens == decode(None, max_tokens=20).tokens and not free.stats.trees


def test_a_chain_cut_from_a_tree_takes_what_its_rows_do():
    """Kernels are made for four rows here: three take longer, and so does a chain of three."""
    chains = {1: 1.0, 2: 1.04, 3: 1.31, 4: 1.05, BLOCK: 1.4}
    draft = {row: 0.1 for row in range(1, BLOCK + 1)}
    trees = Costs({64: {1: 1.0, 64: 2.0}}, {64: {BLOCK: 1.5}})
    table = TreePolicy(Policy(Costs({64: chains}, {64: draft}), BLOCK), trees).table(64)
    assert table.chains[[0, 1, 2, 3]] - table.chains[0] == pytest.approx([0, 0.04, 0.31, 0.05])
