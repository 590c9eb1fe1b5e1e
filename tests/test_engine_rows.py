"""Who gets how many rows: against brute force, and against one request's own policy."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policy import WIDEST, believing
from tinymodels import random_drafter, target

from dflash_mlx.engine.costs import MANY, SharedCosts, measure_shared
from dflash_mlx.engine.engine import Engine
from dflash_mlx.engine.rows import FIRST, FLOOR, GAIN, SLACK, Share, Standing, share
from dflash_mlx.policy import risk, timing
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.offer import Offer, paths
from dflash_mlx.policy.watch import Watch
from dflash_mlx.policy.widths import Policy

RICH = 1e9  # an account that pays for everything


def shared_costs(
    row: float, request: float, draft: float, unread: float = 0.0, ahead: float = 1.0
) -> SharedCosts:
    """A forward of 1 and so much for each further row and request; a draft costs as much again.

    And so much for each token whose features it reads first. A plain round that is begun ahead
    takes a part of one on its own.
    """
    one = {rows: 1 + row * (rows - 1) for rows in (1, 2, 4, 8, 16)}
    many = {MANY * n: 1 + row * (MANY * n - 1) + request * (MANY - 1) for n in (1, 2, 4, 8, 16)}
    drafts = {rows: draft for rows in (2, 4, 8, 16)} | {1: 0.0}
    together = {MANY * n: draft for n in (2, 4, 8, 16)}
    alone = Costs({64: one}, {64: drafts}, unread, ahead)
    return SharedCosts(alone, Costs({64: many}, {64: together}))


def offers_of(rates: list[list[float]]) -> list[Offer]:
    return [Offer(paths(each)) for each in rates]


def speed(rows: tuple[int, ...], offers: list[Offer], costs: SharedCosts) -> float:
    """Tokens per second, counted one by one."""
    tokens = sum(1 + sum(o.chances[: n - 1]) for n, o in zip(rows, offers, strict=True))
    return tokens / seconds(rows, costs)


def seconds(rows: tuple[int, ...], costs: SharedCosts) -> float:
    drafting = [n for n in rows if n > 1]
    verify = costs.verify(np.array([sum(rows)]), len(rows), 64)[0]
    return float(verify + costs.draft(np.array([sum(drafting)]), np.array([len(drafting)]), 64)[0])


def shared_out(offers: list[Offer], costs: SharedCosts, affordable: float = RICH) -> Share:
    """Among requests that have not had a round yet."""
    return share(offers, [Standing() for _ in offers], costs, 64, affordable, Watch())


RATES = st.lists(st.floats(0.05, 0.99), min_size=0, max_size=3)
PRICES = st.tuples(st.floats(0, 0.6), st.floats(0, 0.3), st.floats(0, 1.5))


@settings(max_examples=60)
@given(rates=st.lists(RATES, min_size=2, max_size=4), prices=PRICES)
def test_no_other_rows_are_better(rates, prices):
    """Of all that leave nobody behind; by trying them all."""
    costs, offers = shared_costs(*prices), offers_of(rates)
    found = shared_out(offers, costs)
    plain = (1,) * len(offers)

    def fair(rows: tuple[int, ...]) -> bool:
        least = min(1 + sum(o.chances[: n - 1]) for n, o in zip(rows, offers, strict=True))
        cost = seconds(rows, costs) / seconds(plain, costs)
        return FIRST + min(least, 1 + SLACK) >= FLOOR * cost * (1 - 1e-9)

    every = itertools.product(*(range(1, len(offer.chances) + 2) for offer in offers))
    best = max(speed(rows, offers, costs) for rows in every if fair(rows))
    assert fair(tuple(found.rows))
    assert speed(tuple(found.rows), offers, costs) >= best / GAIN * (1 - 1e-9)
    assert found.cost == pytest.approx(seconds(tuple(found.rows), costs) / seconds(plain, costs))


@settings(max_examples=40)
@given(first=st.floats(0.05, 0.98), later=st.floats(0.3, 0.99), prices=PRICES)
def test_one_request_gets_what_its_own_policy_says(first, later, prices):
    """But for the caution of one alone: the luck of many evens out."""
    row, _, draft = prices
    table = {rows: 1 + row * (rows - 1) for rows in (1, 2, 4, 8, 16)}
    costs = Costs({64: table}, {64: {rows: draft for rows in (2, 4, 8, 16)} | {1: 0.0}})
    widths = believing(costs, first, later).start()
    widths._account.book(0.0, 10.0)  # it can pay for what it wants
    with patch.object(risk, "CAUTION", 0.0):
        own = widths.width(64, WIDEST)
    affordable = widths._account.affordable(widths.rates())
    standing = Standing()
    standing.book(0.0, 10)
    found = share(
        offers_of([widths.rates()]),
        [standing],
        shared_costs(row, 0.1, draft),
        64,
        affordable,
        Watch(),
    )
    assert found.rows == [own]


def test_the_likeliest_rows_of_all_come_first():
    """Six that are mostly wrong and two that are mostly right: one width for all would be wrong."""
    offers = offers_of([[0.97] * 15] * 2 + [[0.3] * 15] * 6)
    found = shared_out(offers, shared_costs(0.01, 0.02, 0.3))
    assert min(found.rows[:2]) >= 8 and max(found.rows[2:]) <= 3


def test_where_rows_cost_as_much_as_forwards_nothing_is_drafted():
    found = shared_out(offers_of([[0.9] * 15] * 32), shared_costs(1.0, 0.0, 0.2))
    assert found.rows == [1] * 32 and found.cost == 1.0


def test_features_to_be_read_first_have_to_be_paid_for_once():
    """What one round pays for serves all after it: it is booked, and no reason to stay narrow."""
    costs = shared_costs(0.05, 0.1, 0.2, unread=0.01)
    read, rates = shared_out(offers_of([[0.9] * 7] * 2), costs), [[0.9] * 7] * 2
    waiting = [replace(offer, unread=60) for offer in offers_of(rates)]
    found = shared_out(waiting, costs)
    assert found.rows == read.rows and min(found.rows) > 4
    assert found.seconds == pytest.approx(read.seconds + 2 * 60 * 0.01)
    assert found.cost == pytest.approx(read.cost + 1.2 / found.plain)
    assert found.drafts == pytest.approx(read.drafts + 1.2)
    affordable = (read.cost + found.cost) / 2
    assert shared_out(offers_of(rates), costs, affordable).rows == read.rows
    assert sum(shared_out(waiting, costs, affordable).rows) < sum(read.rows)


def test_only_who_drafts_reads():
    costs = shared_costs(0.2, 0.1, 0.1, unread=0.01)
    [sure], [unsure] = offers_of([[0.97] * 7]), offers_of([[0.02]])
    found = shared_out([sure, replace(unsure, unread=500)], costs)
    assert found.rows[0] > 1 == found.rows[1] and found == shared_out([sure, unsure], costs)


def test_rows_that_are_asked_for_are_had_whatever_they_cost():
    asked = Offer([1.0] * 7, asked=True)
    found = shared_out([asked, *offers_of([[0.1], []])], shared_costs(1.0, 0.0, 0.2))
    assert found.rows == [8, 1, 1]


def test_costs_grow_with_rows_requests_and_depth():

    def verify(rows, each):
        return {
            depth: {n: (1 + each * n) * (1 + depth / 1e3) for n in rows} for depth in (64, 1024)
        }

    draft = {64: {1: 0.0, 2: 0.2, 16: 0.3}}
    one = Costs(verify((1, 2, 4, 8, 16), 0.1), draft)
    many = Costs(verify((8, 16, 32, 64, 128), 0.15), {64: {16: 0.5, 128: 2.0}})
    costs = SharedCosts(one, many)
    rows = np.arange(1, 300)
    for context in (10, 64, 500, 4000):
        for requests in (1, 2, 8, 32):
            curve = costs.verify(rows, requests, context)
            assert (np.diff(curve) >= -1e-12).all() and curve[0] > 0
        more = [costs.verify(np.array([64]), requests, context)[0] for requests in (1, 4, 8, 32)]
        assert more == sorted(more)
    # As measured where it was measured: one request up to its widest round, eight at any.
    points = [one.verify[64][n] for n in (1, 8, 16)]
    assert costs.verify(np.array([1, 8, 16]), 1, 64) == pytest.approx(points)
    points = [many.verify[64][n] for n in (8, 16, 64, 128)]
    assert costs.verify(np.array([8, 16, 64, 128]), 8, 64) == pytest.approx(points)
    drafts = costs.draft(np.array([0, 16, 128]), np.array([0, 8, 8]), 64)
    assert drafts == pytest.approx([0, 0.5, 2.0])


def test_costs_that_were_measured_to_fall_are_taken_to_stay():
    """A pace that wavered: eight rows alone seemed dear, and sixteen of eight requests cheap."""
    nothing = {64: {1: 0.0}}
    one, many = {64: {1: 1.0, 8: 1.2, 16: 3.0}}, {64: {8: 3.0, 16: 3.1, 128: 9.0}}
    costs = SharedCosts(Costs(one, nothing), Costs(many, nothing))
    for requests in (1, 2, 5, 8, 32):
        curve = costs.verify(np.arange(requests, 300), requests, 64)
        assert (np.diff(curve) >= 0).all()


def test_a_deeper_context_costs_many_what_it_costs_each():
    """The many are measured at one depth; each of their rows meets the keys of its own request."""
    one = {64: {1: 1.0, 16: 2.5}, 1024: {1: 1.2, 16: 5.7}}  # 0.2 s for 960 keys, and 0.2 a row
    near = {64: {8: 3.0, 128: 6.0}}
    nothing = {64: {1: 0.0}}
    costs = SharedCosts(Costs(one, nothing), Costs(near, nothing))
    rows = np.array([8, 64, 128])
    deeper = costs.verify(rows, 8, 1024) - costs.verify(rows, 8, 64)
    assert deeper == pytest.approx([8 * 0.2, 8 * (0.2 + 7 * 0.2), 8 * (0.2 + 15 * 0.2)])


def test_measuring_a_pair_s_shared_rounds(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0)
    measured = measure_shared(target("qwen3"), random_drafter(), 4)
    assert sorted(measured.verify) == sorted(measured.draft) == [timing.DEPTHS[0]]
    assert all(sorted(points) == [8, 16, 32] for points in measured.verify.values())
    assert all(sorted(points) == [16, 32] for points in measured.draft.values())
    assert all(0 < s < 10 for table in measured.verify.values() for s in table.values())


def test_an_engine_that_measures_says_so(monkeypatch, tmp_path):
    def measure_shared(*_):
        return Costs({64: {8: 3.0, 128: 6.0}}, {64: {16: 0.5}})

    monkeypatch.setattr("dflash_mlx.engine.costs.measure_shared", measure_shared)
    monkeypatch.setattr("dflash_mlx.policy.costs._cache_folder", lambda: tmp_path)
    told = []
    for _ in range(2):
        policy = Policy(Costs({64: {1: 1.0, 16: 2.5}}, {64: {1: 0.0}}), 16)
        with Engine(
            target("qwen3"),
            random_drafter(),
            policy=policy,
            meanwhile=lambda what: nullcontext(told.append(what)),
        ):
            pass
    assert told == ["a round of many requests"], "the second finds the first one's file"
