"""A drafter's own confidence: cut where it tells something, and no loss where it tells nothing."""

import functools
import random

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.drafter.protocol import DraftSession
from dflash_mlx.policy.confidence import FIRST_WAIT, Confidence, Cutting
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.cuts import Cuts
from dflash_mlx.policy.outcome import Outcome
from dflash_mlx.policy.rounds import ChainRounds
from dflash_mlx.policy.widths import Policy
from dflash_mlx.proposal import Proposal
from dflash_mlx.sharpness import Sharpness

WIDEST, TOKENS, WRONG = 8, 800, 10**6
WAIT = 0.04  # plain rounds that waiting for a draft takes


def costs(last_row, draft=0.15):
    """A pair whose rounds of 8 rows cost `last_row` plain ones to verify."""
    verify = {row: 1 + (last_row - 1) * (row - 1) / (WIDEST - 1) for row in range(1, WIDEST + 1)}
    return Costs({64: verify}, {64: dict.fromkeys(verify, draft) | {1: 0.0}})


class Drafter:
    """A session over the text 0, 1, 2, ...: slots are right as often as a hidden number says.

    What it says of itself is that number ("informative"), another one ("useless"), its opposite
    ("inverted"), or nothing (None).
    """

    def __init__(self, says, seed):
        self.says, self.luck, self.whim = says, random.Random(seed), random.Random(-seed)

    def propose(self, anchor, width):
        self.odds = [self.luck.gauss(1.2, 3.0) for _ in range(width - 1)]
        tokens = [anchor]
        for slot, odds in enumerate(self.odds):
            right = self.luck.random() < 1 / (1 + np.exp(-odds))
            tokens.append(anchor + slot + 1 if right else WRONG)
        return Proposal(tokens)

    @property
    def says_confidence(self):
        return self.says is not None

    def confidence(self):
        if self.says == "useless":
            return mx.array([self.whim.gauss(1.2, 3.0) for _ in self.odds])
        return mx.array(self.odds) * (-1 if self.says == "inverted" else 1)


def run(says, last_row, seed, policy=None):
    """Tokens per plain round of a request, and how many of its rounds were cut."""
    pair = costs(last_row)
    policy = policy or Policy(pair, WIDEST)
    rounds = ChainRounds(policy.start(), policy.sharpness(0.0), Cuts(policy.confidence(0.0)), False)
    session, seconds = Drafter(says, seed), pair.rounds(64, WIDEST)
    done, spent, cut = 0, 0.0, 0
    while done < TOKENS:
        proposal = rounds.propose(session, done, 64, WIDEST)
        rows = len(proposal)
        accepted = sum(np.cumprod([t == done + at for at, t in enumerate(proposal.tokens)])) - 1
        drafted = (
            rows if rows == 1 and not policy.confidence(0.0).alone.pays else len(session.odds) + 1
        )
        waited = says is not None and policy.confidence(0.0).alone.pays and drafted > 1
        cost = seconds[rows - 1] if not waited else pair.verify[64][rows] + 0.15 + WAIT
        cut += waited and rows < drafted
        tokens = list(range(done + 1, done + accepted + 2))
        rounds.observe(Outcome(proposal, int(accepted), tokens, 1.0, cost))
        done, spent = done + len(tokens), spent + cost
    return done / spent, cut


@functools.cache
def mean(says, last_row):
    runs = [run(says, last_row, seed) for seed in range(8)]
    return np.mean([speed for speed, _ in runs]), [cut for _, cut in runs]


@pytest.mark.parametrize("says", ["informative", "inverted"])
def test_a_head_that_knows_something_makes_rounds_better(says):
    """Whichever way round it says it: what it says is calibrated by what was right."""
    ignoring, _ = mean(None, 3.0)
    using, cut = mean(says, 3.0)
    assert using > 1.04 * ignoring and sum(cut) > 200


@pytest.mark.parametrize("last_row", [1.05, 1.8, 3.0, 4.6])
@pytest.mark.parametrize("says", ["informative", "useless", "inverted"])
def test_no_head_makes_rounds_worse_than_ignoring_it(says, last_row):
    ignoring, _ = mean(None, last_row)
    using, _ = mean(says, last_row)
    assert using > 0.985 * ignoring


def test_a_head_that_knows_nothing_is_not_waited_for():
    """Luck may speak for it in an answer, which costs little (above); in most it does not."""
    _, cut = mean("useless", 3.0)
    assert sorted(cut)[5] < 10, "of some four hundred rounds, in six of eight answers"


def test_where_rows_are_free_nothing_is_cut():
    _, cut = mean("informative", 1.0)
    assert not any(cut)


def test_what_was_learnt_serves_the_next_request():
    policy = Policy(costs(3.0), WIDEST)
    run("informative", 3.0, 0, policy)
    known = policy.confidence(0.0)
    assert known.alone.pays and known.weights[0] > 0.5
    _, cut = run("informative", 3.0, 1, policy)
    assert cut > 50


def test_rates_begin_as_the_beliefs():
    known = Confidence()
    beliefs = [0.9, 0.5, 0.2]
    assert known.rates([3.0, -8.0, 0.0], beliefs) == pytest.approx(beliefs)
    assert not known.alone.pays and not known.shared.pays


def test_waiting_that_takes_long_is_not_paid_for():
    """Rounds that were cut and took twice as long as was measured: the account says so."""
    known, measured = Cutting(), np.linspace(1.15, 4.75, 8)
    for waited in (True, False) * 9:
        known.took(0.0, waited)  # by a clock that stands still
    assert known.seconds(measured) == pytest.approx(FIRST_WAIT * measured)
    for _ in range(10):
        known.took(1.0, waited=False)
        known.took(2.0, waited=True)
    assert known.seconds(measured) == pytest.approx(2 * measured)
    for _ in range(60):
        known.learn(np.array([0.99, 0.99, 0.01]), 2, measured[:4])
    assert not known.pays


class Noting(Confidence):
    """Remembers how many slots of each draft were said to be right."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def learn(self, logits, beliefs, right):
        self.seen.append(right)


def test_a_draft_that_was_cut_is_judged_by_the_text_whatever_came_between():
    """Two slots of four are verified, and a plain round brings the third token after them."""
    known = Noting()
    for _ in range(60):
        known.alone.learn(np.array([0.99, 0.99, 0.01]), 2, np.linspace(1.15, 4.75, 4))
    assert known.alone.pays
    cuts, widths = Cuts(known), Policy(costs(4.6), WIDEST).start()
    rounds = ChainRounds(widths, Sharpness(), cuts, False)

    class Session(DraftSession):
        has_confidence = True

        def propose(self, anchor, width):
            return Proposal([0, 1, 2, 3, 4][:width])

        def confidence(self):
            return mx.array([9.0, 9.0, -9.0, -9.0])

    known.weights = np.array([1.0, 0.0, 0.0])
    widths.width = iter([5, 1, 1]).__next__
    widths.width = lambda *of, wanted=widths.width: wanted()
    for brought, rows in (([1, 2, 3], 3), ([4], 1), ([5], 1)):
        proposal = rounds.propose(Session(), 0, 64, WIDEST)
        assert len(proposal) == rows
        rounds.observe(Outcome(proposal, len(brought) - 1, brought, 1.0, 1.0))
    assert known.seen == [4]
