"""The experiments of scripts/: oracles, the slow, noise of its own, and rejection sampling."""

import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget, softmax
from contestants import Independent, Oracle, Slow
from never_slower import long_answers, policy_rows
from rejection import _accept, rejection_rounds
from sampled_drafts import sampled_rows

import dflash_mlx as dm
from dflash_mlx.settings import SamplingSettings

TABLE = 3 * np.random.default_rng(0).normal(size=(40, 40))


class Drafter(BigramDrafter):
    """One that says how wide it drafts, as networks do."""

    class config:  # noqa: N801
        block_size = 4


@pytest.fixture
def pair():
    return BigramTarget(TABLE), Drafter(TABLE)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_an_oracle_is_right_as_often_as_it_says(pair, p):
    target, _ = pair
    plain = dm.generate(target, None, [0], max_tokens=800, temperature=1.0, seed=1)
    oracle = Oracle([0, *plain.tokens], target.vocab_size, p)
    drafted = dm.generate(
        target, oracle, [0], max_tokens=800, temperature=1.0, seed=1, block_size=2
    )
    assert drafted.tokens == plain.tokens
    assert drafted.stats.acceptance_rate == pytest.approx(p, abs=0.05)


def test_a_slow_one_drafts_the_same(pair):
    target, drafter = pair
    fast, slow = (
        dm.generate(target, d, [0], max_tokens=50, block_size=4)
        for d in (drafter, Slow(drafter, 5))
    )
    assert fast.tokens == slow.tokens and fast.stats.rounds == slow.stats.rounds


def test_noise_of_its_own_is_right_by_chance_only(pair):
    target, drafter = pair
    settings = {"max_tokens": 800, "block_size": 2, "temperature": 1.0, "seed": 1}
    shared = dm.generate(target, drafter, [0], **settings)
    blind = dm.generate(target, Independent(drafter), [0], **settings)
    assert blind.tokens == shared.tokens
    p = softmax(TABLE)
    visited = np.bincount(shared.tokens, minlength=40) / 800
    chance = visited @ (p * p).sum(axis=1)  # that two samples of p are the same
    assert blind.stats.acceptance_rate == pytest.approx(chance, abs=0.06)
    assert shared.stats.acceptance_rate > chance + 0.2


def test_rejection_keeps_the_distribution_and_accepts_as_often_as_possible():
    rng = np.random.default_rng(0)
    p, q = softmax(2 * rng.normal(size=(2, 8)))
    rows, kept, counts = 20000, 0, np.zeros(8)
    for draft in rng.choice(8, size=rows, p=q):
        accepted, after = _accept([draft], np.stack([p, p]), q[None], rng)
        kept += accepted
        counts[draft if accepted else after] += 1
    assert kept / rows == pytest.approx(np.minimum(p, q).sum(), abs=0.015)
    assert np.abs(counts / rows - p).max() < 0.015


def test_rejection_of_a_perfect_drafter_never_rejects_the_first_slot(pair):
    target, drafter = pair
    rounds = rejection_rounds(target, drafter, [0], 100, SamplingSettings(1.0, seed=3), width=2)
    assert rounds == 50


def test_rows_of_both_tables(pair):
    target, drafter = pair
    sampled = list(sampled_rows(target, drafter, [[0], [1]], 40))
    assert [row.temperature for row in sampled] == [0.7, 1.0, 1.5]
    for row in sampled:
        assert row.identical == row.prompts == 2 and row.output_tokens == 80
        assert min(row.learnt, row.one, row.argmax, row.independent, row.rejection) >= 1
        assert 0 < row.share_of_best <= 1
    answers = long_answers(target, [[0], [1]], 30)
    assert [prompt for prompt, _ in answers] == [[0], [1]]
    rows = list(policy_rows(target, drafter, answers, 1))
    assert [row.drafter for row in rows] == ["its own", "right at 0.3", "always wrong", "slow"]
    assert all(row.over_plain > 0 and row.best_width in (1, 2, 4, 8, 16) for row in rows)
