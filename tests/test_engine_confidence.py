"""A drafter's own confidence in rounds that requests share: as alone, and one wait for all."""

import functools
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from crowd import Crowd, Knowing, KnowingSession, Played
from families import random_prompt
from test_confidence import WIDEST, Drafter
from test_engine_rows import shared_costs
from tinymodels import target

from dflash_mlx.engine.rows import SharedRounds
from dflash_mlx.engine.together import Flat
from dflash_mlx.loop import BatchItem
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.cuts import Cuts
from dflash_mlx.policy.outcome import Outcome
from dflash_mlx.policy.rounds import ChainRounds
from dflash_mlx.policy.widths import Policy

COSTS = shared_costs(0.12, 0.1, 0.3)
WAIT = 0.03  # seconds that waiting for the drafts takes, of about 2 that a round does
NOTHING = Costs({1: {1: 1.0}}, {1: {1: 1.0}})


class Counted(Drafter):
    """Says how many rows it drafted in this round."""

    drafted = 0

    def propose(self, anchor, width):
        self.drafted = width
        return super().propose(anchor, width)


class Asking:
    """A request over the text 0, 1, 2, ..., whose drafter says something of itself."""

    def __init__(self, policy, says, seed):
        cuts = Cuts(policy.confidence(0.0))
        self.rounds = ChainRounds(policy.start(), policy.sharpness(0.0), cuts, False)
        self.drafter, self.anchor = Counted(says, seed), 0
        self.target, self.doubt, self.can_pipeline = SimpleNamespace(position=64), 0.0, True

    def offer(self, rest):
        return self.rounds.offer(self.drafter, self.anchor, 64, WIDEST, rest)

    def absorb(self, proposal, took):
        tokens = np.array(proposal.tokens).tolist()
        right = int(sum(np.cumprod([t == self.anchor + at for at, t in enumerate(tokens)]))) - 1
        text = list(range(self.anchor + 1, self.anchor + right + 2))
        self.anchor += len(text)
        self.rounds.observe(Outcome(proposal, right, text, 1.0, took, shared=True))
        return SimpleNamespace(tokens=text)


@functools.cache
def played(says, wait=WAIT, rounds=150, requests=4):
    """Tokens per second of these requests together, and in how many rounds any was cut."""
    now, policy = [0.0], Policy(NOTHING, WIDEST)
    shared = SharedRounds(COSTS, lambda: now[0])
    together, cut = Flat(target(), shared), 0
    asking = [Asking(policy, says, seed) for seed in range(requests)]
    for _ in range(rounds):
        turns = [BatchItem(each) for each in asking]
        together.propose(turns)
        drafted = [each.drafter.drafted for each in asking if each.drafter.drafted]
        rows = sum(len(turn.proposal) for turn in turns)
        took = float(COSTS.verify(np.array([rows]), requests, 64)[0]) + wait * shared.waited
        took += float(COSTS.draft(np.array([sum(drafted)]), np.array([len(drafted)]), 64)[0])
        cut += shared.waited and rows < sum(drafted)
        now[0] += took
        for turn in turns:
            assert turn.error is None
            turn.event = turn.request.absorb(turn.proposal, took)
            turn.request.drafter.drafted = 0
        together.observe(turns)
    return sum(each.anchor for each in asking) / now[0], cut


def test_rows_follow_what_a_drafter_says_of_its_chains():
    ignoring, _ = played(None)
    using, cut = played("informative")
    assert using > 1.05 * ignoring and cut > 100, (using / ignoring, cut)


def test_a_drafter_that_knows_nothing_is_not_waited_for():
    ignoring, _ = played(None)
    using, cut = played("useless")
    assert using > 0.985 * ignoring and cut < 10, (using / ignoring, cut)


def test_waits_that_take_long_are_given_up():
    ignoring, _ = played(None)
    using, cut = played("informative", wait=1.0)
    assert using > 0.95 * ignoring and 5 <= cut < 40, (using / ignoring, cut)


class Sure(Knowing):
    """Knows which of its slots are right, and says so. Chains only."""

    def start(self, target, sampler):
        return SureSession(self, 0)


class SureSession(KnowingSession):
    has_confidence = True

    def propose(self, anchor, width):
        proposal = super().propose(anchor, width)
        so_far = [*self.tokens, anchor]
        text = next(text for text in self.known.texts if text[: len(so_far)] == so_far)
        truth = [*text[len(so_far) :], *[-1] * width]
        pairs = zip(proposal.tokens[1:], truth, strict=False)
        self.sure = mx.array([9.0 if token == right else -9.0 for token, right in pairs])
        return proposal

    def confidence(self):
        return self.sure


@pytest.mark.parametrize("pays", [False, True])
def test_texts_stay_and_a_round_waits_once_more_where_that_pays(pays, monkeypatch):
    model, length, waits = target(), 40, []
    asked = [
        ([token % 192 for token in random_prompt(5 + seed, seed)], {"max_tokens": length})
        for seed in range(5)
    ]
    crowd = Crowd(model, asked)
    policy = Policy(NOTHING, WIDEST)
    known = policy.confidence(0.0)
    known.weights = np.array([1.0, 0.0, 0.0])
    known.shared._drafts = 0 if pays else -(10**6)  # it is never known to pay
    for _ in range(60 * pays):
        known.shared.learn(np.array([0.99, 0.01]), 1, np.array([1.0, 3.0, 5.0]))
    rounds = SharedRounds(shared_costs(0.05, 0.01, 0.1), float)
    played = Played(model, crowd.knowing(0.8, kind=Sure), Flat(model, rounds))
    jobs = [played.submit(prompt, policy=policy, **how) for prompt, how in asked]
    played.scheduler.step()
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *of: waits.append(rounds.waited) or evaluate(*of))
    steps = 0
    while len(played.scheduler._running) == len(jobs) and steps < 4:
        played.scheduler.step()
        steps += 1
    assert len(waits) == (2 if pays else 1) * steps and steps > 1
    monkeypatch.undo()
    played.run()
    assert [job.result().tokens for job in jobs] == crowd.alone
    # Nothing wrong is verified, where it is known.
    wrong = sum(job.stats.drafted_tokens - job.stats.accepted_tokens for job in jobs)
    assert wrong == 0 if pays else wrong > 10, wrong
