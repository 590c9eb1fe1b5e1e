"""Shared steps: rows are allocated by likelihood and cost, and a step waits for the device once."""

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
NUMPY_FUNCTIONS = ("array", "asarray", "ascontiguousarray")  # wait if their argument is MLX's


def test_a_shared_step_waits_for_the_device_once(monkeypatch):
    """Every call that makes the host wait is counted, whoever makes it."""
    waits = []

    def counting(name: str, call: Callable) -> Callable:
        def counted_call(*arguments: Any, **named: Any) -> Any:
            if name not in NUMPY_FUNCTIONS or isinstance(arguments[0], mx.array):
                waits.append(name)
            return call(*arguments, **named)

        return counted_call

    engine = SteppedEngine(tiny_target(), random_drafter(), SharedBatch(tiny_target(), None))
    sampling: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "seed": 2},
        {"presence_penalty": 0.3},
    ]
    for number in range(9):
        settings = sampling[number % len(sampling)]
        engine.submit(small_prompt(5 + number, number), max_tokens=60, **settings)
    while len(engine.scheduler._running) < 9 or engine.scheduler._prefilling:
        engine.scheduler.step()
    for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__array__"):
        if hasattr(mx.array, name):
            monkeypatch.setattr(mx.array, name, counting(name, getattr(mx.array, name)))
    for name in ("eval", "synchronize"):
        monkeypatch.setattr(mx, name, counting(name, getattr(mx, name)))
    for name in NUMPY_FUNCTIONS:
        monkeypatch.setattr(np, name, counting(name, getattr(np, name)))
    for _ in range(4):
        engine.scheduler.step()
    # `tolist` does not wait here: it reads arrays that `eval` has computed.
    assert [wait for wait in waits if wait != "tolist"] == ["eval"] * 4


@pytest.fixture(scope="module")
def pair() -> tuple[dm.Target, Any]:
    return dm.load("tiny", "tiny")


@pytest.fixture(scope="module")
def alone(pair) -> list[tuple[list[dict[str, str]], dm.Result]]:
    """Questions, and the pair's result for each of them alone."""
    questions = [prompt.messages for prompt in embedded_prompts()][:MANY]
    return [(question, dm.generate(*pair, question, max_tokens=24)) for question in questions]


def test_a_shared_step_gives_as_many_tokens_per_request_as_a_step_alone(pair, alone):
    with dm.Engine(*pair) as engine:
        jobs = [engine.submit(question, max_tokens=24) for question, _ in alone]
        results = [job.result() for job in jobs]
    assert [result.tokens for result in results] == [result.tokens for _, result in alone]

    def tokens_per_step(results: list[dm.Result]) -> float:
        tokens = sum(result.stats.round_tokens for result in results)
        return tokens / sum(result.stats.rounds for result in results)

    tokens_alone = tokens_per_step([result for _, result in alone])
    assert tokens_alone > 3
    assert tokens_per_step(results) == pytest.approx(tokens_alone, rel=0.02)


POLICIES = {  # by the cost of a further row, in plain steps
    "chains": lambda row: policy_with_costs(16, row, 0.2),
    "trees": lambda row: policy_with_costs(16, row, 0.2, trees=True),
    "trees of nine": lambda row: None,
}


class Allocator(RowAllocator):
    """An allocator for which a further row costs `row` plain steps, and a draft 0.2."""

    def __init__(self, row, policy=None):
        super().__init__(policy or DraftPolicy(16))
        self._policy.costs = GivenCosts(row, 0.2)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("row", [0.01, 3.0])
def test_rows_are_allocated_by_cost_and_texts_are_those_alone(pair, alone, name, row):
    policy = POLICIES[name](row)
    engine = SteppedEngine(*pair, SharedBatch(pair[0], Allocator(row)))
    settings = {"policy": policy, "tree_budget": 9 if policy is None else None}
    jobs = [engine.submit(question, max_tokens=24, **settings) for question, _ in alone[:4]]
    engine.run()
    for job, (_, result) in zip(jobs, alone, strict=False):
        assert job.result().tokens == result.tokens
    drafted = sum(job.stats.drafted_tokens for job in jobs)
    if name == "trees of nine":
        assert all(max(job.stats.widths) == 9 for job in jobs)
    elif row > 1:
        assert drafted < 0.4 * sum(job.stats.output_tokens for job in jobs)
    else:
        assert drafted > 0.7 * sum(job.stats.output_tokens for job in jobs)


def test_the_likeliest_rows_are_allocated_until_they_cost_more_than_they_give():
    """A request with a required number of rows gets them in any case."""
    allocator = Allocator(0.2)
    likely = DraftCandidate([0.99, 0.98, 0.97, 0.96])
    unlikely = DraftCandidate([0.1, 0.01])
    rows_of_likely, rows_of_unlikely = allocator.allocate([likely, unlikely])
    assert rows_of_likely > 2 and rows_of_unlikely == 1
    assert allocator.allocate([unlikely, unlikely]) == [1, 1]
    required = DraftCandidate([1.0] * 7, required=True)
    assert allocator.allocate([required, unlikely])[0] == 8


def test_a_lookup_without_a_match_is_no_candidate_for_rows():
    planner = Planner()
    session = LookupDrafter().start(None, None)
    assert not planner.candidate(session, 3, 8).path_probs
    session.lookup.read([3, 4, 5, 3])
    assert len(planner.candidate(session, 4, 8).path_probs) == 7


def test_a_batch_stops_drafting_where_it_learns_that_rows_are_expensive():
    """A plain step of three requests takes 1 second, one with drafts 2 seconds plus 1 per row."""
    now = [0.0]
    allocator = RowAllocator(DraftPolicy(16), lambda: now[0])
    likely = DraftCandidate([0.9**slot for slot in range(1, 16)])
    rows = []
    for _ in range(150):
        rows.append(sum(allocator.allocate([likely] * 3)))
        now[0] += 1.0 if rows[-1] == 3 else 2.0 + rows[-1]
        tokens = 1 if rows[-1] == 3 else 3
        allocator.observe([tokens] * 3, pipelined=False)
    assert max(rows[:10]) > 3 and sum(count > 3 for count in rows[-50:]) < 10


def run_three_jobs(pair: Any, alone: Any, drafter: Any, policy: Any) -> list[dm.Job]:
    """Run the first three questions in one engine, and check that the texts are those alone."""
    engine = SteppedEngine(pair[0], drafter, SharedBatch(pair[0], Allocator(0.01)))
    jobs = [engine.submit(question, max_tokens=24, policy=policy) for question, _ in alone[:3]]
    engine.run()
    for job, (_, result) in zip(jobs, alone, strict=False):
        assert job.result().tokens == result.tokens
    return jobs


@pytest.mark.parametrize("name", [None, *POLICIES])
def test_a_network_combined_with_lookup_drafts_for_all_in_one_pass(pair, alone, name, monkeypatch):
    passes = 0
    original_logits = DFlash.logits

    def logits(*inputs):
        nonlocal passes
        passes += 1
        return original_logits(*inputs)

    monkeypatch.setattr(DFlash, "logits", logits)
    policy = None if name is None else POLICIES[name](0.01)
    jobs = run_three_jobs(pair, alone, CombinedDrafter(pair[1]), policy)
    steps = [job.stats.rounds for job in jobs]
    assert 0 < passes <= max(steps) + 1 < sum(steps), "requests did not share passes"
