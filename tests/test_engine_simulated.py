"""Rows shared out round after round, on a machine that is made up: what nobody may lose."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_rows import offers_of, seconds, shared_costs

from dflash_mlx.engine.rows import FLOOR, SharedRounds
from dflash_mlx.policy.account import ALLOWANCE, CREDIT
from dflash_mlx.policy.watch import BELIEVED, SEEN

SLOTS = 15


class Asking:
    """A request."""

    doubt = 0.5

    def __init__(self, believed: float, right: float, can_pipeline: bool = True) -> None:
        self.believed, self.right, self.can_pipeline, self.tokens = believed, right, can_pipeline, 0


class Machine:
    """Rounds of requests together, which take the seconds of `real`, and a clock that shows them.

    Attributes:
        spent: of all rounds, in plain rounds of the same requests, which are begun ahead.
        rows: of the last round.
    """

    def __init__(self, believed, real=None) -> None:
        self.real, self.now, self.spent, self.rows = real or believed, 0.0, 0.0, ()
        self.rounds, self.luck = SharedRounds(believed, lambda: self.now), random.Random(1)

    def play(self, requests: list[Asking]) -> None:
        offers = offers_of([[each.believed] * SLOTS for each in requests])
        self.rows = tuple(self.rounds.rows(requests, offers, 64))
        self.now += seconds(self.rows, self.real)
        plain = self.real.ahead * seconds((1,) * len(requests), self.real)
        self.spent += seconds(self.rows, self.real) / plain if max(self.rows) > 1 else 1.0
        brought = []
        for each, rows in zip(requests, self.rows, strict=True):
            wrong = (at for at in range(rows - 1) if self.luck.random() >= each.right)
            brought.append((each, 1 + next(wrong, rows - 1)))
            each.tokens += brought[-1][1]
        self.rounds.observe(brought)


def test_nobody_is_left_behind_for_the_others():
    """One is always right and one always wrong, and the first would rather have wide rounds."""
    machine, wide = Machine(shared_costs(0.1, 0.0, 0.2)), 0
    requests = [Asking(0.999, 1.0), Asking(0.01, 0.0)]
    for _ in range(200):
        machine.play(requests)
        wide += machine.rows[0] > 1
    assert requests[1].tokens / machine.spent >= FLOOR - 0.01 and 10 < wide < 200


RATE = st.floats(0.0, 0.99)


@settings(max_examples=25)
@given(
    people=st.lists(st.tuples(RATE, RATE), min_size=2, max_size=6),
    row=st.floats(0.01, 0.4),
    draft=st.floats(0.05, 1.0),
)
def test_whatever_is_believed_wrongly_everybody_had_the_floor(people, row, draft):
    """At any moment of a text, less a fixed number of tokens."""
    machine, requests = Machine(shared_costs(row, 0.05, draft)), [Asking(*of) for of in people]
    for _ in range(60):
        machine.play(requests)
        assert min(each.tokens for each in requests) >= FLOOR * machine.spent - CREDIT - 1e-6


@pytest.mark.parametrize("ahead", [1.0, 0.6])
@pytest.mark.parametrize("requests", [2, 8, 32])
def test_the_account_limits_what_can_be_lost(requests, ahead):
    """Beliefs that are all wrong: every slot is said to be right, and none is."""
    machine, played = Machine(shared_costs(0.02, 0.01, 0.5, ahead=ahead)), 300
    asking = [Asking(0.9, 0.0) for _ in range(requests)]
    for _ in range(played):
        machine.play(asking)
    assert machine.spent <= played * (1 + ALLOWANCE) + CREDIT + 1


def test_plain_rounds_that_are_begun_ahead_are_what_drafting_has_to_beat():
    """Three rows for half again the time of one: that is less than plain rounds at half of it."""
    machine = Machine(shared_costs(0.05, 0.0, 0.2, ahead=0.5))
    for can_pipeline in (True, False):
        requests = [Asking(0.45, 0.45, can_pipeline) for _ in range(2)]
        drafted = 0
        for _ in range(40):
            machine.play(requests)
            drafted += max(machine.rows) > 1
        assert drafted < 5 if can_pipeline else drafted > 30


def test_beside_one_that_drafts_in_every_round_nothing_is_begun_ahead():
    """So that others have rounds on their own to beat."""
    rounds = SharedRounds(shared_costs(0.05, 0.0, 0.2, ahead=0.5))
    asked, other = offers_of([[0.9] * 3, [0.6] * SLOTS])
    requests = [Asking(0.9, 0.9), Asking(0.6, 0.6)]
    assert rounds.rows(requests, [replace(asked, asked=True), other], 64)[1] > 1


def after(rounds: int, believed, real, last=10) -> list[tuple[int, ...]]:
    """The rows of the last of these rounds, of four requests that are mostly right."""
    machine, requests, rows = Machine(believed, real), [Asking(0.8, 0.8) for _ in range(4)], []
    for _ in range(rounds):
        machine.play(requests)
        rows.append(machine.rows)
    return rows[-last:]


CHEAP, DEAR = (0.01, 0.02, 0.2), (1.0, 0.0, 0.5)


def test_costs_that_are_wrong_give_way_to_what_rounds_take():
    cheap, dear = shared_costs(*CHEAP), shared_costs(*DEAR)
    assert min(map(min, after(150, cheap, cheap))) > 1
    assert max(map(max, after(150, dear, dear))) == 1
    # Measured on a busy machine, so to say; and on an idle one.
    assert min(map(min, after(150, dear, cheap))) > 1
    assert max(map(max, after(150, cheap, dear))) == 1


def test_nothing_is_tried_where_rounds_take_what_was_measured():
    """Answers may have ten rounds: five plain ones, to know their cost, were half of them."""
    cheap = shared_costs(*CHEAP)
    assert min(map(min, after(60, cheap, cheap, last=60))) > 1


def test_what_was_measured_is_tried_no_more_often_than_it_takes_to_believe_it():
    """The first drafts of many requests read all their prompts: they are dear."""
    dear = shared_costs(*DEAR)
    assert sum(max(rows) > 1 for rows in after(150, dear, dear, last=150)) == BELIEVED


def test_plain_rounds_that_were_measured_too_dear_are_found_out():
    """Drafted ones take what was measured, and so say nothing of it."""
    real = shared_costs(1.0, 0.0, 0.0)

    class Dear:
        draft, read, ahead = real.draft, real.read, real.ahead

        @staticmethod
        def verify(rows, requests, context):
            return real.verify(rows, requests, context) * np.where(rows == requests, 1.6, 1.0)

    assert max(map(max, after(4, Dear, real))) > 1
    assert max(map(max, after(150, Dear, real))) == 1


def test_a_machine_that_is_slower_altogether_changes_nothing():
    costs = shared_costs(*CHEAP)

    class Slower:
        verify = staticmethod(lambda *of: 3 * costs.verify(*of))
        draft, ahead = staticmethod(lambda *of: 3 * costs.draft(*of)), costs.ahead

    assert after(4 * SEEN, costs, Slower) == after(4 * SEEN, costs, costs)
