"""Shared steps: rows by likelihood and cost, no request left behind, one wait per step."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from families import small_prompt
from request_set import SteppedEngine
from simulated import GivenCosts, policy_with_costs
from tinymodels import random_drafter
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.bench.datasets import embedded_prompts
from dflash_mlx.drafter.dflash import DFlash
from dflash_mlx.drafter.lookup_drafter import CombinedDrafter, LookupDrafter
from dflash_mlx.engine.allocation import RowAllocator
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.policy.draft_policy import DraftPolicy
from dflash_mlx.policy.planner import DraftCandidate, Planner

MANY = 32
OF_NUMPY = ("array", "asarray", "ascontiguousarray")  # which read what they are given


def test_a_round_of_many_waits_for_the_device_once(monkeypatch):
    """Everything that makes the host wait is counted, whoever calls it."""
    waits = []

    def counted(name: str, call: Callable) -> Callable:
        def watched(*arguments: Any, **named: Any) -> Any:
            if name not in OF_NUMPY or isinstance(arguments[0], mx.array):
                waits.append(name)
            return call(*arguments, **named)

        return watched

    played = SteppedEngine(tiny_target(), random_drafter(), SharedBatch(tiny_target(), None))
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 2}, {"presence_penalty": 0.3}]
    for number in range(9):
        played.submit(small_prompt(5 + number, number), max_tokens=60, **ways[number % len(ways)])
    while len(played.scheduler._running) < 9 or played.scheduler._prefilling:
        played.scheduler.step()
    for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__array__"):
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, counted(name, getattr(mx.array, name)))
    for name in ("eval", "synchronize"):
        monkeypatch.setattr(mx, name, counted(name, getattr(mx, name)))
    for name in OF_NUMPY:
        monkeypatch.setattr(np, name, counted(name, getattr(np, name)))
    for _ in range(4):
        played.scheduler.step()
    # What was evaluated is read without another wait: features, and drafts to compare.
    assert [wait for wait in waits if wait != "tolist"] == ["eval"] * 4


@pytest.fixture(scope="module")
def pair() -> tuple[dm.Target, Any]:
    return dm.load("tiny", "tiny")


@pytest.fixture(scope="module")
def alone(pair) -> list[tuple[list[dict[str, str]], dm.Result]]:
    """Questions, and what the pair makes of each by itself."""
    questions = [prompt.messages for prompt in embedded_prompts()][:MANY]
    return [(ask, dm.generate(*pair, ask, max_tokens=24)) for ask in questions]


def test_rounds_of_many_bring_as_much_as_those_of_one(pair, alone):
    with dm.Engine(*pair) as engine:
        jobs = [engine.submit(ask, max_tokens=24) for ask, _ in alone]
        results = [job.result() for job in jobs]
    assert [result.tokens for result in results] == [result.tokens for _, result in alone]

    def tokens_a_round(all_of_them: list[dm.Result]) -> float:
        stats = [result.stats for result in all_of_them]
        return sum(each.round_tokens for each in stats) / sum(each.rounds for each in stats)

    single = tokens_a_round([result for _, result in alone])
    assert single > 3 and abs(tokens_a_round(results) / single - 1) < 0.02


POLICIES = {
    "chains": lambda row: policy_with_costs(16, row, 0.2),
    "trees": lambda row: policy_with_costs(16, row, 0.2, trees=True),
    "trees of nine": lambda row: None,
}


class Allocator(RowAllocator):
    """Of a machine where a row more of each request costs so much of a plain step."""

    def __init__(self, row, policy=None):
        super().__init__(policy or DraftPolicy(16))
        self._policy.costs = GivenCosts(row, 0.2)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("row", [0.01, 3.0])
def test_rows_are_allocated_by_cost_and_no_text_changes(pair, alone, name, row):
    policy = POLICIES[name](row)
    played = SteppedEngine(*pair, SharedBatch(pair[0], Allocator(row)))
    settings = {"policy": policy, "tree_budget": 9 if policy is None else None}
    jobs = [played.submit(ask, max_tokens=24, **settings) for ask, _ in alone[:4]]
    played.run()
    for job, (_, result) in zip(jobs, alone, strict=False):
        assert job.result().tokens == result.tokens
    drafted = sum(job.stats.drafted_tokens for job in jobs)
    if name == "trees of nine":
        assert all(max(job.stats.widths) == 9 for job in jobs)
    elif row > 1:
        assert drafted < 0.4 * sum(job.stats.output_tokens for job in jobs)
    else:
        assert drafted > 0.7 * sum(job.stats.output_tokens for job in jobs)


def test_the_likeliest_rows_are_taken_until_they_cost_more():
    allocator = Allocator(0.2)
    sure = DraftCandidate([0.99, 0.98, 0.97, 0.96])
    unsure = DraftCandidate([0.1, 0.01])
    first, second = allocator.allocate([sure, unsure])
    assert first > 2 and second == 1
    assert allocator.allocate([unsure, unsure]) == [1, 1]
    required = DraftCandidate([1.0] * 7, required=True)
    assert allocator.allocate([required, unsure])[0] == 8


def test_a_lookup_that_finds_nothing_asks_for_no_rows():
    planner = Planner()
    session = LookupDrafter().start(None, None)
    assert not planner.candidate(session, 3, 8).path_probs
    session.lookup.read([3, 4, 5, 3])
    assert len(planner.candidate(session, 4, 8).path_probs) == 7


def test_costs_of_shared_steps_are_learnt():
    """Steps of two rows each take five plain ones here: the batch decodes plainly from then on."""
    now = [0.0]
    allocator = RowAllocator(DraftPolicy(16), lambda: now[0])
    likely = DraftCandidate([0.9**slot for slot in range(1, 16)])
    rows = []
    for _ in range(150):
        rows.append(sum(allocator.allocate([likely] * 3)))
        now[0] += 1.0 if rows[-1] == 3 else 2.0 + rows[-1]
        brought = 1 if rows[-1] == 3 else 3
        allocator.observe([brought] * 3, pipelined=False)
    assert max(rows[:10]) > 3 and sum(count > 3 for count in rows[-50:]) < 10


def drafted_for_three(pair: Any, alone: Any, drafter: Any, policy: Any) -> list[dm.Job]:
    """Jobs whose texts are those alone."""
    played = SteppedEngine(pair[0], drafter, SharedBatch(pair[0], Allocator(0.01)))
    jobs = [played.submit(ask, max_tokens=24, policy=policy) for ask, _ in alone[:3]]
    played.run()
    for job, (_, result) in zip(jobs, alone, strict=False):
        assert job.result().tokens == result.tokens
    return jobs


@pytest.mark.parametrize("name", [None, *POLICIES])
def test_a_network_beside_a_lookup_drafts_for_many(pair, alone, name, monkeypatch):
    """In one pass for all, as without the lookup."""
    passes = []
    logits = DFlash.logits
    monkeypatch.setattr(DFlash, "logits", lambda *inputs: passes.append(1) or logits(*inputs))
    policy = None if name is None else POLICIES[name](0.01)
    jobs = drafted_for_three(pair, alone, CombinedDrafter(pair[1]), policy)
    rounds = [job.stats.rounds for job in jobs]
    assert 0 < len(passes) <= max(rounds) + 1 < sum(rounds)
