"""Draft lengths: near the best fixed one on any machine, and never much slower than plain."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bigrams import BigramDrafter, BigramTarget
from simulated import (
    LONGEST,
    Machine,
    Session,
    fixed_cost,
    play,
    policy_with_costs,
    text_of,
)

import dflash_mlx as dm
from dflash_mlx.drafter.protocol import DraftSession
from dflash_mlx.policy.budget import LOSS_PER_TOKEN, MAX_LOSS, expected_loss
from dflash_mlx.policy.draft_policy import DraftPolicy
from dflash_mlx.policy.estimates import AcceptanceEstimates
from dflash_mlx.policy.planner import AdaptivePlanner
from dflash_mlx.policy.step_costs import MAX_AGE, STEPS_TO_REFRESH_PLAIN, StepCosts
from dflash_mlx.proposal import Proposal

MACHINES = {
    "rows nearly free, as on a GPU": ({16: 1.2}, {2: 0.1, 16: 0.15}),
    "rows cheap": ({16: 1.8}, {2: 0.4, 16: 0.5}),
    "rows dear": ({16: 4.6}, {2: 0.3, 16: 1.3}),
    "drafts dear": ({2: 1.2, 4: 1.25, 8: 1.4, 16: 1.78}, {2: 0.83, 8: 0.95, 16: 1.15}),
    "kernels for 4 and 8 rows": (
        {2: 1.3, 3: 1.35, 4: 1.05, 5: 1.6, 7: 1.7, 8: 1.3, 9: 2.1, 16: 2.2},
        {2: 0.1, 16: 0.2},
    ),
}
DRAFTERS = {
    "useless": lambda token, slot: 0.0,
    "weak": lambda token, slot: 0.3,
    "medium": lambda token, slot: 0.6,
    "good": lambda token, slot: 0.93 - 0.02 * slot,
    "perfect": lambda token, slot: 1.0,
    "good and bad in turns": lambda token, slot: 0.95 if token // 40 % 2 else 0.2,
    "suddenly bad": lambda token, slot: 0.95 if token < 150 else 0.0,
    "suddenly good": lambda token, slot: 0.0 if token < 150 else 0.95,
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_nearly_as_good_as_the_best_fixed_length(machine, drafter):
    here = Machine(*MACHINES[machine])
    policies = DraftPolicy(LONGEST), [DraftPolicy(LONGEST) for _ in range(3)]
    kept = policies[0]
    spent = {"kept": 0.0, "new": 0.0}
    fixed = dict.fromkeys((1, 2, 4, 8, 16), 0.0)
    for seed in range(3):
        text = text_of(DRAFTERS[drafter], 400, seed)
        spent["kept"] += play(kept, here, text)[0]
        spent["new"] += play(policies[1][seed], here, text)[0]
        for length in fixed:
            fixed[length] += fixed_cost(length, here, text)
    most = 1.25 if "kernels" in machine else 1.12  # single lengths are found out slowly
    assert spent["kept"] < most * min(fixed.values())
    assert spent["new"] < 1.08 * most * min(fixed.values())
    assert max(spent.values()) < 1.05 * fixed[1]


@pytest.mark.parametrize("draft", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("turn", [3, 20, 39])
def test_a_request_loses_no_more_than_its_budget(draft, turn):
    """A drafter that is perfect until it is trusted, and useless from then on."""
    here = Machine({16: 1.8}, {1: draft}, noise=0.0)
    policy = policy_with_costs(LONGEST, row=0.8 / 15, draft=draft)
    text = [15 if token < 10 * turn else 0 for token in range(900)]
    planner = AdaptivePlanner(policy)
    done = 0
    spent = 0.0
    lost = 0.0
    while done < len(text):
        proposal = planner.propose(Session(), 0, min(LONGEST, len(text) - done))
        accepted = min(text[done], len(proposal) - 1)
        planner.observe(proposal, [0] * (accepted + 1), None)
        done = done + accepted + 1
        spent = spent + here.costs[len(proposal) - 1]
        lost = max(lost, spent - done)
    assert lost <= MAX_LOSS + LOSS_PER_TOKEN * len(text) + 1


def test_a_useless_drafter_is_tried_ever_more_rarely():
    here = Machine(*MACHINES["rows cheap"])
    policy = DraftPolicy(LONGEST)
    _, rows = play(policy, here, [0] * 1000)
    tried = [place for place, count in enumerate(rows) if count > 1]
    assert 2 <= len(tried) < 40 and len([place for place in tried if place > 500]) <= 12
    _, rows = play(policy, here, [0] * 200)  # the next request knows
    assert sum(count > 1 for count in rows) <= 5


def test_a_request_of_shorter_drafts_than_the_policy_s_is_probed_too():
    """None was, as a probe waited for a draft of the policy's block size."""
    planner = AdaptivePlanner(policy_with_costs(2 * LONGEST, row=0.02))
    rows = []
    for _ in range(60):
        planner._estimates.learn(15, 0)
    for _ in range(60):
        proposal = planner.propose(Session(), 0, LONGEST)
        planner.observe(proposal, [0], 1e-3)
        rows.append(len(proposal))
    assert max(rows) > 1


def learnt(costs, steps):
    """Take in steps of so many rows and seconds, several times."""
    for _ in range(10):
        for rows, seconds in steps:
            costs.observe("chain", rows, seconds)


WRONG = {  # what two machines were measured to take when they were busy: rows and seconds
    "2 rows at 2.97, 4 and 8 rows at 1.00": [(1, 1.0), (2, 2.97), (1, 1.0), (4, 1.0), (8, 1.0)],
    "1 row at 136, 12 at 498, 16 at 123": [(1, 0.136), (12, 0.498), (1, 0.136), (16, 0.123)],
    "a plain step that stalled": [(1, 10.0), (2, 1.3), (4, 1.4), (8, 1.6), (16, 1.9)],
    "every draft five times too dear": [(1, 1.0), (2, 6.0), (1, 1.0), (8, 8.0), (16, 9.0)],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("drafter", ["useless", "medium", "good", "perfect"])
def test_wrong_costs_are_corrected_by_real_steps(wrong, drafter):
    here = Machine(*MACHINES["rows dear"])
    policy = DraftPolicy(LONGEST)
    learnt(policy.costs, WRONG[wrong])
    for seed in range(3):
        text = text_of(DRAFTERS[drafter], 600, seed)
        spent, _ = play(policy, here, text)
    best = min(fixed_cost(length, here, text) for length in (1, 2, 4, 8, 16))
    assert spent < 1.1 * best


def test_a_busy_start_does_not_keep_an_answer_plain():
    """All rows seemed dear. Probes come soon all the same, and the comparisons are forgotten."""
    spent = 0.0
    best = 0.0
    for seed in range(12):
        here = Machine(*MACHINES["rows cheap"])
        policy = DraftPolicy(LONGEST)
        learnt(policy.costs, [(1, 1.0), (2, 2.56), (4, 3.0), (1, 1.0), (8, 3.8)])
        text = text_of(DRAFTERS["good"], 600, seed)
        spent += play(policy, here, text)[0]
        best += min(fixed_cost(length, here, text) for length in (1, 2, 4, 8, 16))
    assert spent < 1.16 * best


@pytest.mark.parametrize("stall", [10, 1000])
def test_one_step_that_stalled_does_not_end_drafting(stall):
    policy = DraftPolicy(LONGEST)
    for rows, seconds in ((12, 1.7 * stall), (1, 1.0)):
        policy.costs.observe("chain", rows, seconds)
    assert policy.costs.cost("chain", 16) < 4 * StepCosts().cost("chain", 16)
    spent, _ = play(policy, Machine(*MACHINES["rows dear"]), text_of(DRAFTERS["perfect"], 80, 1))
    assert spent < 0.7 * 80


def test_a_length_that_always_runs_is_compared_with_plain_steps():
    """No length locks itself in: plain steps are timed now and then, and its own cost is seen."""
    costs = StepCosts()
    learnt(costs, [(1, 1.0), (16, 1.0)])
    assert costs.cost("chain", 16) < 1.1
    for _ in range(300):
        rows = 1 if costs.needs_plain_step() else 16
        costs.observe("chain", rows, 1.0 if rows == 1 else 4.0)
    assert costs.cost("chain", 16) == pytest.approx(4.0, rel=0.15)
    costs = StepCosts()  # at the start the first plain step comes early
    for _ in range(4):
        rows = 1 if costs.needs_plain_step() else 16
        costs.observe("chain", rows, 1.0 if rows == 1 else 8.0)
    assert costs.cost("chain", 16) > 5


def test_old_comparisons_are_forgotten():
    costs = StepCosts()
    typical = [costs.cost("chain", rows) for rows in range(1, 17)]
    learnt(costs, [(1, 1.0), (4, 4.0)])
    assert costs.cost("chain", 4) > 2 * typical[3]
    for _ in range(MAX_AGE + STEPS_TO_REFRESH_PLAIN):
        costs.observe("chain", 1, 1.0)
    assert [costs.cost("chain", rows) for rows in range(1, 17)] == pytest.approx(typical)


def test_a_shared_step_costs_plain_steps_of_its_requests():
    costs = StepCosts()
    row = costs.cost("lookup", 2) - 1
    assert costs.cost("chain", 10, 2) == pytest.approx(costs.cost("chain", 10) / (1 + row))


def test_a_drafter_token_by_token_costs_by_the_longest_draft():
    costs = StepCosts(slot=0.2)
    assert costs.cost("chain", 9, 4) == costs.cost("chain", 12, 4) == costs.cost("chain", 3)
    for _ in range(30):
        costs.observe("chain", rows=4, seconds=1.0, requests=4)
        costs.observe("chain", rows=9, seconds=3.0, requests=4)
    assert costs.cost("chain", 9, 4) == pytest.approx(3.0, rel=0.1)


def test_estimates_follow_what_was_right():
    estimates = AcceptanceEstimates(15)
    assert len(estimates.path_probs) == 15
    for _ in range(60):
        estimates.learn(15, 2)
    assert estimates.path_probs[1] > 0.9 and estimates.path_probs[2] < 0.15
    first = estimates.path_probs[0]
    for _ in range(2000):
        estimates.fade()
    assert estimates.path_probs[0] < first, "what was seen long ago counts less"


def test_the_expected_loss_is_a_mean():
    paths = [0.9, 0.5, 0.1]
    cost = 2.6
    of_tokens = {1: 0.1, 2: 0.4, 3: 0.4, 4: 0.1}
    mean = sum(p * max(0.0, cost - tokens) for tokens, p in of_tokens.items())
    assert expected_loss(paths, cost) == pytest.approx(mean)


class Finds(DraftSession):
    """Drafts of a lookup that are right at some rate, and of a network unless there is none."""

    def __init__(self, rates, network=True):
        self.rates = rates
        self.kinds = []
        self.has_network = network

    def extend(self, taps, kept=None, tokens=()):
        raise NotImplementedError

    @property
    def network(self):
        return self if self.has_network else None

    def lookup_rates(self, anchor, width):
        return self.rates[: width - 1]

    def propose_lookup(self, anchor, width):
        self.kinds.append("lookup")
        return Proposal([anchor] * width)

    def propose(self, anchor, width):
        self.kinds.append("network")
        return Proposal([anchor] * width)


@pytest.mark.parametrize(
    ("rates", "network", "kind"),
    [([0.99] * 15, True, "lookup"), ([0.2, 0.2], True, "network"), ([0.9] * 9, False, "lookup")],
)
def test_a_lookup_drafts_where_it_promises_more(rates, network, kind):
    session = Finds(rates, network)
    planner = AdaptivePlanner(policy_with_costs(LONGEST, 0.05, draft=0.5))
    for _ in range(5):
        proposal = planner.propose(session, 7, LONGEST)
        planner.observe(proposal, [7] * len(proposal), 1e-3)
    assert session.kinds == [kind] * 5


def test_a_lookup_does_not_put_off_the_next_try_of_the_network():
    def tries(every):
        session = Finds([])
        planner = AdaptivePlanner(policy_with_costs(LONGEST, 0.6, draft=0.5))
        for step in range(1200):
            session.rates = [0.9] if step % every == 0 else []
            drafts = len(session.kinds)
            proposal = planner.propose(session, 7, LONGEST)
            right = session.kinds[drafts:] == ["lookup"]
            planner.observe(proposal, [7] * (1 + right), 1e-3)
        return session.kinds.count("network")

    assert tries(every=3) >= tries(every=1201) > 1


def test_plain_steps_are_pipelined_where_nothing_pays():
    """All but those at which a decision is due; and none where a lookup finds something."""
    planner = AdaptivePlanner(policy_with_costs(LONGEST, 3.0))
    quiet = Session()
    finding = Finds([0.5], network=False)
    pipelined = 0
    for _ in range(100):
        if not planner.next_is_plain(quiet, 0, LONGEST):
            assert len(planner.propose(quiet, 0, LONGEST)) == 1
        assert not planner.next_is_plain(finding, 0, LONGEST)
        pipelined += planner.next_is_plain(quiet, 0, LONGEST)
        planner.observe(Proposal([0]), [0], 1e-3)
    assert pipelined > 75


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_loop_follows_the_policy_and_the_text_does_not(temperature):
    table = 3 * np.random.default_rng(0).normal(size=(40, 40))
    target = BigramTarget(table)
    drafter = BigramDrafter(table)
    settings = {"temperature": temperature, "seed": 3, "max_tokens": 300}
    plain = dm.generate(target, None, [0], **settings)
    policy = dm.DraftPolicy.of(target, drafter)
    free = dm.generate(target, drafter, [0], policy=policy, **settings)
    pinned = dm.generate(target, drafter, [0], policy=policy, block_size=5, **settings)
    assert free.tokens == pinned.tokens == plain.tokens
    assert sum(free.stats.widths.values()) == free.stats.rounds and len(free.stats.widths) > 1
    assert max(pinned.stats.widths) == 5 and pinned.stats.widths[5] > 0.9 * pinned.stats.rounds
    assert any("rows" in line for line in policy.describe(temperature))


@pytest.mark.parametrize("guess", [0.02, 0.15, 0.6])
@pytest.mark.parametrize("begin", [0.0, 0.4])
@pytest.mark.parametrize("slot", [0.05, 0.15, 0.4])
def test_what_a_drafted_token_costs_is_learnt_and_decides_the_length(guess, begin, slot):
    """A drafter that drafts token by token: the dearer a token, the shorter the drafts."""
    machine = Machine({16: 1.3}, {2: begin + slot, 16: begin + 15 * slot})
    text = text_of(lambda token, position: 0.8, 3000)
    spent, rows = play(DraftPolicy(LONGEST, slot_cost=guess), machine, text)
    best = min(range(1, LONGEST + 1), key=lambda length: fixed_cost(length, machine, text))
    assert spent < 1.07 * fixed_cost(best, machine, text)
    drafted = sorted(count for count in rows if count > 1)
    assert abs(drafted[len(drafted) // 2] - best) <= max(1, best // 2)


def test_requests_of_many_threads_teach_one_policy():
    costs = StepCosts()

    def teach(requests: int) -> None:
        for step in range(3000):
            rows = requests + step % 5
            costs.observe("chain", rows=rows, seconds=1e-3 * rows, requests=requests)
            costs.needs_plain_step(requests)
            assert costs.plain_seconds is None or costs.cost("chain", rows, requests) >= 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            [*threads.map(teach, (1, 1, 4, 16))]
    finally:
        sys.setswitchinterval(interval)
