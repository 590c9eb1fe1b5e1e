"""Learning how far to trust the drafter, from the text alone."""

import mlx.core as mx
import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget

import dflash_mlx as dm
from dflash_mlx.policy.fixed import FixedWidth
from dflash_mlx.proposal import Proposal
from dflash_mlx.sampling import Sampler
from dflash_mlx.settings import SamplingSettings
from dflash_mlx.sharpness import FIRST, GRID, SELDOM, SOON, Sharpness


def test_it_starts_at_its_prior_and_follows_the_evidence():
    sharpness = Sharpness()
    assert sharpness.value == FIRST
    for _ in range(3):
        sharpness.learn([4] + [2] * (len(GRID) - 1))
    assert sharpness.value == GRID[0]
    for _ in range(400):  # the text changed: old blocks are forgotten
        sharpness.learn([2] * (len(GRID) - 1) + [3])
    assert sharpness.value == GRID[-1]


class Unsure(BigramDrafter):
    """A drafter whose opinion is right and three times too weak."""

    def __init__(self, table, doubt):
        super().__init__(table / doubt)


@pytest.mark.parametrize("doubt", [1.0, 3.0])
def test_the_learnt_one_is_as_good_as_the_best_fixed_one(doubt):
    table = 3 * np.random.default_rng(5).normal(size=(32, 32))
    target, drafter, lengths = BigramTarget(table), Unsure(table, doubt), {}
    for grid in [GRID, *((s,) for s in GRID)]:
        settings = {"temperature": 1.0, "seed": 8, "max_tokens": 600, "block_size": 2}
        settings["policy"] = FixedWidth(Sharpness(grid))
        lengths[grid] = dm.generate(target, drafter, [0], **settings).stats.acceptance_length
    assert lengths[GRID] >= 0.97 * max(lengths.values())
    assert max(lengths.values()) > 1.05 * min(lengths.values()), "every s is as good: no test"


def test_a_pinned_one_drafts_one_block_only():
    sampler = Sampler(SamplingSettings(temperature=1.0, seed=1), sharpness=Sharpness((2.0,)))
    assert sampler.sharpness.value == 2.0 and sampler.sharpness.best == 0


def test_after_the_first_drafts_few_are_drawn_with_every_s():
    sharpness = Sharpness()
    drawn = [sharpness.trials() for _ in range(SOON + 4 * SELDOM)]
    assert drawn[:SOON] == [GRID] * SOON
    assert drawn[SOON:].count(GRID) == 4 and drawn[SOON:].count((FIRST,)) == 4 * (SELDOM - 1)


def test_a_block_that_was_drawn_alone_scores_nothing():
    """Its tokens are those of the best s; what an earlier draft left over is not judged by it."""
    table = np.random.default_rng(5).normal(size=(32, 32))
    logits = mx.array(table[:3], mx.float32)
    sampler = Sampler(SamplingSettings(temperature=1.0, seed=8), [0])
    compared = sampler.draft(logits)
    sampler.sharpness._drafts = SOON  # none of the next few is compared
    assert sampler.draft(logits).tolist() == compared.tolist()
    decision = sampler.decide(Proposal([0]), logits[:1])
    sampler.take(decision, decision.values.tolist())
    sampler.commit([1, 2, 3])
    assert sampler.sharpness._scores == [0.0] * len(GRID)
