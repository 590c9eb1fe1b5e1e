"""What rounds of many requests cost and bring, counted; and a grammar among them."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from crowd import Crowd, Played
from families import random_prompt
from test_engine_rows import shared_costs
from tinymodels import random_drafter
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.bench.datasets import embedded_prompts
from dflash_mlx.drafter.combined import CombinedDrafter
from dflash_mlx.drafter.lookup import LookupDrafter
from dflash_mlx.drafter.network import DFlash
from dflash_mlx.engine.rows import SharedRounds
from dflash_mlx.engine.together import Flat
from dflash_mlx.policy.costs import Costs
from dflash_mlx.policy.trees import TreePolicy
from dflash_mlx.policy.widths import Policy

MANY = 32
OF_NUMPY = ("array", "asarray", "ascontiguousarray")  # which read what they are given
STILL = float  # a clock that stands still, so that no round says that made-up costs are wrong


def prompt_of(length: int, seed: int) -> list[int]:
    return [token % 192 for token in random_prompt(length, seed)]


def test_a_round_of_many_waits_for_the_device_once(monkeypatch):
    """Everything that makes the host wait is counted, whoever calls it."""
    waits = []

    def counted(name: str, call: Callable) -> Callable:
        def watched(*arguments: Any, **named: Any) -> Any:
            if name not in OF_NUMPY or isinstance(arguments[0], mx.array):
                waits.append(name)
            return call(*arguments, **named)

        return watched

    played = Played(tiny_target(), random_drafter(), Flat(tiny_target(), None))
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7, "seed": 2}, {"presence_penalty": 0.3}]
    for number in range(9):
        played.submit(prompt_of(5 + number, number), max_tokens=60, **ways[number % len(ways)])
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
    # What was evaluated, features along with it, is read without another wait.
    assert waits == ["eval", "tolist"] * 4


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

    one = tokens_a_round([result for _, result in alone])
    assert one > 3 and abs(tokens_a_round(results) / one - 1) < 0.02


def policies() -> dict[str, Any]:
    """Policies of the pair for which rows cost little, or as much as forwards."""
    table = {rows: 1 + 0.02 * (rows - 1) for rows in (1, 2, 4, 8, 16)}
    draft = {1: 0.0} | dict.fromkeys((2, 4, 8, 16), 0.2)
    costs = Costs({64: table}, {64: draft})
    trees = Costs({64: {4: 1.3, 64: 1.6}}, {64: {16: 1.2}})
    return {
        "chains": Policy(costs, 16),
        "trees": TreePolicy(Policy(costs, 16), trees),
        "trees of nine": TreePolicy.fixed(9),
    }


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("row", [0.01, 1.0])
def test_a_policy_shares_out_rows_and_changes_no_text(pair, alone, name, row):
    policy = policies()[name]
    together = Flat(pair[0], SharedRounds(shared_costs(row, 0.01, 0.2), STILL))
    played = Played(*pair, together)
    jobs = [played.submit(ask, max_tokens=24, policy=policy) for ask, _ in alone[:4]]
    played.run()
    for job, (_, result) in zip(jobs, alone, strict=False):
        assert job.result().tokens == result.tokens
    drafted = sum(job.stats.drafted_tokens for job in jobs)
    if name == "trees of nine":
        assert all(max(job.stats.widths) == 9 for job in jobs)
    elif row == 1.0:  # all but those that their own policy drafts when they are the last
        assert drafted < 0.4 * sum(job.stats.output_tokens for job in jobs)
    else:
        assert drafted > 0.7 * sum(job.stats.output_tokens for job in jobs)


class NeverShared(SharedRounds):
    """Of an engine with one job."""

    def rows(self, requests, offers, context):
        raise AssertionError("one job shares its rounds with nobody")


def test_one_job_is_left_to_its_own_policy(pair, alone):
    """Whose widths are those that sharing out would give it: see test_engine_rows."""
    ask, result = alone[0]
    played = Played(*pair, Flat(pair[0], NeverShared(shared_costs(0.01, 0.01, 0.2), STILL)))
    job = played.submit(ask, max_tokens=24, policy=policies()["chains"])
    played.run()
    assert job.result().tokens == result.tokens and job.stats.drafted_tokens > 0


class Counted(Flat):
    """Rounds whose drafting broke off are counted."""

    broken = 0

    def propose(self, turns):
        self.broken += 1
        super().propose(turns)
        self.broken -= 1


def no_longer(tokens: mx.array, logits: mx.array) -> mx.array:
    if len(tokens) > 14:
        raise ZeroDivisionError("the grammar is broken")
    return logits


@pytest.mark.parametrize("settings", [{}, {"tree_budget": 6}])
def test_an_error_in_drafting_is_its_request_s_own(settings):
    """Of a processor that the network's logits are shown to, in a pass over the blocks of all."""
    model, drafter = tiny_target(), random_drafter()
    together = Counted(model, None)
    played = Played(model, drafter, together)
    prompts = [prompt_of(5 + number, number) for number in range(3)]
    bad = played.submit(prompt_of(9, 9), logits_processors=lambda: [no_longer], **settings)
    jobs = [played.submit(prompt, max_tokens=20, **settings) for prompt in prompts]
    played.run()
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert together.broken == 0, "nobody else had to read anything again"
    for job, prompt in zip(jobs, prompts, strict=True):
        assert job.result().tokens == dm.generate(model, None, prompt, max_tokens=20).tokens


def drafted_for_three(pair: Any, alone: Any, drafter: Any, policy: Any) -> list[dm.Job]:
    """Jobs whose texts are those alone."""
    together = Flat(pair[0], SharedRounds(shared_costs(0.01, 0.01, 0.2), STILL))
    played = Played(pair[0], drafter, together)
    jobs = [played.submit(ask, max_tokens=24, policy=policy) for ask, _ in alone[:3]]
    played.run()
    for job, (_, result) in zip(jobs, alone, strict=False):
        assert job.result().tokens == result.tokens
    return jobs


def test_a_lookup_drafts_for_many(pair, alone):
    for policy in (None, policies()["chains"]):
        drafted_for_three(pair, alone, LookupDrafter(), policy)


@pytest.mark.parametrize("name", [None, *policies()])
def test_a_network_beside_a_lookup_drafts_for_many(pair, alone, name, monkeypatch):
    """In one pass for all, as without the lookup."""
    passes, logits = [], DFlash.logits
    monkeypatch.setattr(DFlash, "logits", lambda *of: passes.append(1) or logits(*of))
    policy = None if name is None else policies()[name]
    jobs = drafted_for_three(pair, alone, CombinedDrafter(pair[1]), policy)
    rounds = [job.stats.rounds for job in jobs]
    assert 0 < len(passes) <= max(rounds) + 1 < sum(rounds)


def test_a_grammar_among_other_requests(pair, alone):
    pytest.importorskip("llguidance")
    from dflash_mlx.structured import JsonSchema

    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["sum"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    requests = [
        ([1, 2, 3], {"max_tokens": 30, "logits_processors": lambda: [JsonSchema(pair[0], schema)]}),
        ([4, 5], {"max_tokens": 12, "temperature": 0.9, "seed": 1}),
        ([6, 7, 8, 9], {"max_tokens": 12}),
    ]
    crowd = Crowd(pair[0], requests)
    for drafter in (pair[1], crowd.knowing(0.7)):
        played = Played(pair[0], drafter, Flat(pair[0], None))
        jobs = [played.submit(prompt, block_size=3, **settings) for prompt, settings in requests]
        for _ in range(2):
            played.scheduler.step()
        assert 0 < jobs[0].stats.output_tokens < len(crowd.alone[0])
        while played.scheduler._running:  # the grammar's is half way through
            played.scheduler.preempt()
        played.run()
        assert [job.result().tokens for job in jobs] == crowd.alone
        assert 0 <= json.loads(jobs[0].result().text)["sum"] <= 999
