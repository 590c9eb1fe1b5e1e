"""Cost curves: the fit, the depth, the cached file, and a real measurement."""

import json
import random
from contextlib import contextmanager
from statistics import median
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinymodels import random_drafter, target

from dflash_mlx.policy import costs, timing
from dflash_mlx.policy.costs import (
    Costs,
    curve,
    evened,
    measure,
    monotone,
    pair_costs,
    read_costs,
)
from dflash_mlx.policy.kept import UNREADABLE
from dflash_mlx.proposal import Proposal


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_a_fit_never_falls_and_is_no_dearer_than_a_wider_one(values):
    fitted = monotone(values)
    assert len(fitted) == len(values) and fitted == sorted(fitted)
    for at, cost in enumerate(fitted):
        assert cost <= (1 + costs.DENT) * min(values[at:]) + 1e-9
    assert monotone(fitted) == pytest.approx(fitted)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_a_fall_is_evened_out_or_stays_as_it_was(values):
    dear = [at for at, of in enumerate(values) if of > (1 + costs.DENT) * min(values[at:])]
    found = evened(values)
    assert len(found) == len(values)
    assert [found[at] for at in dear] == [values[at] for at in dear]
    others = [of for at, of in enumerate(found) if at not in dear]
    assert others == sorted(others)
    assert sum(found) == pytest.approx(sum(values))


@given(st.lists(st.floats(1, 1 + costs.DENT), min_size=1, max_size=20))
def test_what_falls_by_chance_is_evened_out(values):
    assert sum(monotone(values)) == pytest.approx(sum(values))


def test_rows_that_kernels_are_made_for_cost_what_they_do():
    """SmolLM2 on a CPU, 25 November 2026: four rows take no longer than one, three do."""
    verify = {1: 1.0, 2: 1.04, 3: 1.31, 4: 0.99, 5: 1.25, 6: 1.29, 7: 1.55, 8: 1.2}
    draft = {1: 0.0, 2: 0.12, 3: 0.13, 4: 0.15, 5: 0.13, 6: 0.16, 7: 0.17, 8: 0.2}
    found = Costs({64: verify}, {64: draft}).rounds(64, 8)
    taken = [verify[rows] + draft[rows] for rows in verify]
    assert found == pytest.approx(taken, rel=0.02), "each what was measured of it"
    assert curve({64: verify}, 64, 8)[2:4] == pytest.approx([0.99] * 2, rel=0.05), "never falls"


def test_a_round_that_is_cheaper_by_chance_is_evened_out():
    costs = Costs({64: {1: 1.0, 2: 1.2, 3: 1.16}}, {64: {1: 0.0, 2: 0.1, 3: 0.1}})
    assert costs.rounds(64, 3) == pytest.approx([1.0, 1.28, 1.28])
    assert costs.forwards(64, 3) == pytest.approx([1.0, 1.18, 1.18])


def test_a_forward_takes_no_more_than_its_round():
    """Three rows were drafted in no time: their round took what it did, and so did its forward."""
    costs = Costs({64: {1: 1.0, 2: 1.2, 3: 1.16}}, {64: {1: 0.0, 2: 0.2, 3: 0.0}})
    assert costs.rounds(64, 3) == pytest.approx([1.0, 1.4, 1.16])
    assert costs.forwards(64, 3) == pytest.approx([1.0, 1.18, 1.16])


def test_a_forward_of_rows_that_kernels_are_not_made_for_takes_what_was_measured():
    costs = Costs({64: {1: 1.0, 2: 1.04, 3: 1.31, 4: 1.05}}, {64: {1: 0.0, 2: 0.1, 4: 0.1}})
    assert costs.forwards(64, 4) == pytest.approx([1.0, 1.04, 1.31, 1.05])


def test_curves_are_linear_between_points_and_in_depth():
    points = {100: {1: 1.0, 2: 2.0, 8: 5.0}, 1100: {1: 2.0, 2: 3.0, 8: 8.0}}
    assert curve(points, 100, 8) == pytest.approx([1, 2, 2.5, 3, 3.5, 4, 4.5, 5])
    assert curve(points, 600, 8)[0] == pytest.approx(1.5)
    assert curve(points, 2100, 8)[-1] == pytest.approx(11)
    # Deeper and cheaper is chance; wider than measured goes on as the last two points do.
    assert curve({10: {1: 2.0}, 20: {1: 1.0}}, 1000, 3) == [2.0, 2.0, 2.0]
    assert curve({10: {1: 1.0, 2: 2.0}}, 10, 4) == [1.0, 2.0, 3.0, 4.0]
    assert curve({10: {2: 2.0, 4: 4.0}}, 10, 4) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("widest", [16, 64, 2048])
def test_a_fall_at_the_end_is_not_continued(widest):
    """16 rows were quicker than 12: nobody would believe that 64 take next to nothing."""
    points = {64: {1: 1.0, 12: 1.6, 16: 1.5}}
    assert curve(points, 64, widest)[15:] == pytest.approx([1.5] * (widest - 15), rel=0.05)
    rounds = Costs(points, {64: {1: 0.0, 12: 0.3, 16: 0.2}}).rounds(64, widest)
    assert rounds[0] == 1.0 and rounds[-1] == pytest.approx(1.7, rel=0.05)
    falls_first = curve({64: {8: 1.5, 16: 1.0, 32: 2.0}}, 64, 32)
    assert falls_first[:15] == pytest.approx([1.0] * 15, rel=0.07)


def test_a_plain_round_drafts_nothing():
    points = {64: {1: 1.0, 4: 1.3}}
    assert Costs(points, {64: {1: 0.0, 4: 0.5}}).rounds(64, 4)[0] == 1.0
    assert Costs(points, {64: {1: 0.0, 4: 0.5}}).rounds(64, 4)[-1] == pytest.approx(1.8)


def test_measuring_a_pair():
    measured = measure(target("qwen3"), random_drafter(), 16)
    for table in (measured.verify, measured.draft):
        assert list(table) == list(timing.DEPTHS)
        assert all(list(points) == list(costs.ROWS) for points in table.values())
    assert 0 <= measured.unread < 0.1
    rounds = measured.rounds(300, 16)
    assert len(rounds) == 16 and 0 < rounds[0] < 1 and rounds[0] <= min(rounds)
    assert evened(rounds[1:]) == pytest.approx(rounds[1:])


class Clocked:
    """Sessions that need 2 s for a draft, and 0.25 s for each token that they read first."""

    tap_layers = ()

    def __init__(self):
        self.now, self.unread = 0.0, 0

    def start(self, target, sampler):
        return self

    def extend(self, taps):
        self.unread += taps.shape[1]

    def propose(self, anchor, width):
        self.now, self.unread = self.now + 2 + 0.25 * self.unread, 0
        return Proposal([anchor] * width)


def test_what_each_feature_that_is_read_first_takes(monkeypatch):
    drafter = Clocked()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: drafter.now)
    monkeypatch.setattr(costs, "time_rounds", lambda *_: ({64: {2: 1.0}}, {64: {2: 1.0}}))
    assert measure(target("qwen3"), drafter, 2).unread == pytest.approx(0.25)


def test_what_is_begun_ahead_is_timed_in_turns_with_what_is_not(monkeypatch):
    """By a clock that says what rounds on their own take, and a part of it for those ahead."""
    took = [0.9, *[0.06, 0.1] * (timing.PASSES - 1), 0.3, 0.1]  # the first warms up
    ticks = iter([tick for seconds in took for tick in (0.0, seconds)])
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr(timing, "time", clock)
    pair = target("qwen3"), random_drafter()
    assert timing.time_ahead(*pair, None) == 1.0, "a CPU is not asked"
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert timing.time_ahead(*pair, None) == pytest.approx(0.6)
    assert next(ticks, None) is None
    ticks = iter([0.0, 1.0] * (2 * timing.PASSES + 1))
    monkeypatch.setattr(costs, "time_rounds", lambda *of: ({64: {1: 1.0}}, {64: {1: 0.0}}))
    monkeypatch.setattr(costs, "seconds_of_unread", lambda *of: 0.0)
    assert measure(*pair, 16).ahead == 1.0
    ticks = iter([0.0, 1.0] + [0.0, 0.5, 0.0, 1.0] * timing.PASSES)
    assert measure(*pair, 16).ahead == 0.5


@pytest.mark.parametrize(
    ("took", "seconds", "often"),
    [
        (1e-9, 1e9, timing.PASSES * (1 + timing.REPEATS)),
        (1e-9, 0, 1 + timing.REPEATS),
        (1.0, 1e9, timing.PASSES + 1),
        (1.0, 0, 2),
    ],
)
def test_how_often_rounds_are_timed(monkeypatch, took, seconds, often):
    """With those that warm up: whoever starts a server waits for them."""
    monkeypatch.setattr(timing, "SECONDS", seconds)
    played = []

    def begin(depth):
        def play(rows):
            played.append((depth, rows))
            return (took * rows,)

        return play

    (found,) = timing.time_rounds(target("qwen3"), (1, 4), 4, begin, (8,))
    assert played.count((8, 1)) == played.count((8, 4)) == often
    assert found == {8: {1: pytest.approx(took), 4: pytest.approx(4 * took)}}


def test_a_machine_whose_pace_changes_between_passes_favours_no_width():
    luck, played = random.Random(1), []
    paces = [luck.uniform(0.5, 2) for _ in range(timing.PASSES)]

    def begin(depth):
        def play(rows):
            played.append(rows)
            passed = (played.count(rows) - 1) // (1 + timing.REPEATS)
            return paces[passed] * 1e-6 * rows, paces[passed] * 1e-6

        return play

    verify, draft = timing.time_rounds(target("qwen3"), (1, 2, 4, 8), 8, begin, (8,))
    for rows in (2, 4, 8):
        assert verify[8][rows] / verify[8][1] == pytest.approx(rows)
        assert draft[8][rows] == pytest.approx(draft[8][1])
    assert verify[8][1] == pytest.approx(median(paces) * 1e-6)


FORWARDS = {"64": {"1": 1.0, "16": 2.0}}
DRAFTS = {"64": {"1": 0.0, "16": 0.5}}


@pytest.mark.parametrize(
    "changed",
    [
        {"verify": {}, "draft": {}},
        {"verify": {"64": {}}},
        {"verify": {"64": {"1": 0.0}}},
        {"verify": {"64": {"1": 1.0, "2": float("nan")}}},
        {"verify": {"64": {"1": float("inf")}}},
        {"verify": {"64": {"1": 10**400}}},
        {"draft": {"64": {"1": -1.0}}},
        {"draft": {"128": {"1": 0.0}}},
        {"verify": {d: {"1": 1.0} for d in "123"}, "draft": {d: {"1": 0.0} for d in "123"}},
        {"verify": {"64": {"-3": 1.0}}},
        {"unread": -1.0},
        {"unread": "often"},
        {"ahead": 0.0},
        {"ahead": 1.5},
    ],
)
def test_costs_that_cannot_be_are_not_read(tmp_path, changed):
    file = tmp_path / "pair.json"
    good = {"verify": FORWARDS, "draft": DRAFTS, "unread": 0.25, "ahead": 0.9}
    file.write_text(json.dumps(good))
    assert read_costs(file).verify == {64: {1: 1.0, 16: 2.0}}
    file.write_text(json.dumps(good | changed))
    with pytest.raises(UNREADABLE):
        read_costs(file)


def test_measured_once_and_read_afterwards(tmp_path, monkeypatch):
    pair, made, told = (target("qwen3"), random_drafter()), [], []

    def fake(*arguments):
        made.append(arguments)
        return Costs({64: {1: 1.0, 16: 2.0}}, {64: {1: 0.0, 16: 0.5}}, unread=0.25)

    @contextmanager
    def meanwhile(what):
        told.append((what, len(made)))
        yield
        assert told[-1] == (what, len(made) - 1), "measured in here"

    def found(pair, widest=16, **how):
        return pair_costs(*pair, widest, meanwhile=meanwhile, **how)

    monkeypatch.setattr(costs, "measure", fake)
    monkeypatch.setattr(costs, "_cache_folder", lambda: tmp_path / "new")
    first, second = found(pair), found(pair)
    assert first == second and len(made) == 1 and read_costs(first[1]) == first[0]
    assert found(pair, again=True) == first and len(made) == 2
    assert found(pair, 8)[0] == first[0] and len(made) == 3, "another width is another curve"
    assert found((target("llama"), pair[1]))[0] == first[0] and len(made) == 4
    files = list((tmp_path / "new").iterdir())
    for file in files:
        file.write_text(json.dumps({"verify": 3}))
    with pytest.warns(UserWarning, match="is damaged: costs are measured anew"):
        assert found(pair) == first and len(made) == 5
    (tmp_path / "a file").touch()
    monkeypatch.setattr(costs, "_cache_folder", lambda: tmp_path / "a file")
    assert found(pair)[0] == first[0] and len(made) == 6, "a folder that cannot be is no error"
    assert told == [("a round", before) for before in range(6)], "said whenever it is done"
