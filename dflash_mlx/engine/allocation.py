"""Rows for the requests of a batch: the likeliest drafted rows of all, until the next costs more.

A row is accepted with the probability of its path, which falls along a draft. So the best n rows of
a batch are the n likeliest of all requests. One pass over them, likeliest first, finds the number
that brings the most tokens per second. It may be none: then the batch decodes plainly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from ..policy.budget import CREDIT, Budget
from ..policy.draft_policy import DraftPolicy
from ..policy.planner import GAIN, DraftCandidate, plain_steps_after
from ..policy.step_costs import PARTS, StepCosts
from ..request import Request

FLOOR = 0.9  # of plain batching's speed, for every request,
MEMORY = 0.95  # where gains of earlier steps count as well, so much less a step later
LEAD = 0.4  # that a request starts with, in tokens


class RowAllocator:
    """Decides how many rows of each request a shared step verifies.

    Costs are learnt from shared steps, for each number of requests up to a factor of two. A step's
    cost goes by its total rows, in parts of a row per request.

    Args:
        policy: of the pair.
        clock: in seconds.
    """

    def __init__(self, policy: DraftPolicy, clock: Callable[[], float] = time.perf_counter) -> None:
        self._policy, self._clock, self._budget = policy, clock, Budget()
        self._leads: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._costs: dict[int, StepCosts] = {}
        self._plain_left = self._in_vain = 0  # see `AdaptivePlanner`
        self._started: float | None = None  # the time of `allocate`; None for a pipelined step
        self._ended = 0.0
        self._rows, self._cost = 1, 1.0  # of the step, in the table of costs

    @property
    def can_pipeline(self) -> bool:
        """Whether more plain steps are decided."""
        return self._plain_left > 1

    def allocate(
        self, requests: Sequence[Request], candidates: Sequence[DraftCandidate]
    ) -> list[int]:
        """Rows of each request, the anchor included.

        Args:
            requests: that share the step.
            candidates: what each of them could have verified.
        """
        self._started = self._clock()
        count, costs = len(requests), self._costs_of(len(requests))
        rows = [1 + len(one.path_probs) if one.required else 1 for one in candidates]
        required = sum(rows) - count
        owners, probs = _ranked(candidates)
        chosen = 0
        if len(probs) and self._plain_left == 0 and not costs.needs_plain_step:
            chosen = self._best(requests, costs, owners, probs, required)
            self._in_vain = 0 if chosen + required else self._in_vain + 1
            self._plain_left = plain_steps_after(self._in_vain)
        for owner in owners[:chosen].tolist():
            rows[owner] += 1
        table = costs.table("chain")
        self._rows = 1 + int(_places(table, required + chosen, count))
        self._cost = table[self._rows - 1]
        return rows

    def observe(self, tokens: Sequence[tuple[Request, int]], pipelined: bool) -> None:
        """Take in how many tokens a step brought each request.

        Args:
            tokens: of each request.
            pipelined: whether the next step has started already.
        """
        now, started = self._clock(), self._started
        was_pipelined, self._started = started is None, None
        if was_pipelined:
            started, self._rows, self._cost = self._ended, 1, 1.0
        self._ended = now
        if not tokens or started is None:
            return
        # A step that only starts or only ends a pipeline takes two forwards, or part of one.
        seconds = now - started if pipelined == was_pipelined else None
        if self._rows == 1:
            self._plain_left = max(0, self._plain_left - 1)
        self._costs_of(len(tokens)).observe("chain", self._rows, seconds)
        for request, brought in tokens:
            lead = self._leads.get(request, LEAD) + brought - FLOOR * self._cost
            self._leads[request] = MEMORY * lead if lead > 0 else lead
        mean = sum(brought for _, brought in tokens) / len(tokens)
        self._budget.record(self._cost, mean)
        self._policy.count(self._rows > 1, mean, self._cost)

    def _best(
        self,
        requests: Sequence[Request],
        costs: StepCosts,
        owners: np.ndarray,
        probs: np.ndarray,
        required: int,
    ) -> int:
        """How many of the ranked rows bring the most tokens per second."""
        count = len(requests)
        table = costs.table("chain")
        cost = np.array(table)[_places(table, required + np.arange(len(probs) + 1), count)]
        tokens = 1 + np.concatenate([[0.0], probs.cumsum()]) / count
        most = np.minimum(self._budget.max_cost, self._max_fair_cost(requests, owners, probs))
        speed = np.where(cost <= most, tokens / cost, 0.0)
        best = int(speed.argmax())
        if tokens[best] * cost[0] > GAIN * tokens[0] * cost[best]:
            return best
        probe = min(len(probs), count)
        is_time = cost[probe] <= most[probe] and self._policy.should_probe(float(cost[probe]))
        return probe if is_time else 0

    def _max_fair_cost(
        self, requests: Sequence[Request], owners: np.ndarray, probs: np.ndarray
    ) -> np.ndarray:
        """The cost [n + 1] of a step with 0 to n ranked rows that leaves no request behind.

        None may be expected to fall below `FLOOR` of plain batching, but for its lead. And no step
        may cost it more than its credit, should all its drafts be wrong.
        """
        leads = np.array([self._leads.get(request, LEAD) for request in requests])
        brought = np.zeros((len(probs) + 1, len(requests)))
        brought[np.arange(1, len(probs) + 1), owners] = probs
        expected = 1 + brought.cumsum(axis=0)
        bearable = np.minimum(np.maximum(0, leads) + expected, 1 + leads + CREDIT)
        least: np.ndarray = bearable.min(axis=1) / FLOOR
        return least

    def _costs_of(self, requests: int) -> StepCosts:
        """Costs of steps of about so many requests, by the rows of a request."""
        requests = max(2, requests)  # one that others have left with an error
        at = requests.bit_length()
        if at not in self._costs:
            self._costs[at] = StepCosts(self._policy.block_size, requests, self._policy.slot_cost)
        return self._costs[at]


def _ranked(candidates: Sequence[DraftCandidate]) -> tuple[np.ndarray, np.ndarray]:
    """The rows that may be had, likeliest first: whose each is, and its path's probability."""
    optional = [() if one.required else one.path_probs for one in candidates]
    owners = np.repeat(np.arange(len(optional)), [len(probs) for probs in optional])
    probs = np.array([one for each in optional for one in each])
    order = np.argsort(-probs, kind="stable")  # a request's rows stay in their order
    return owners[order], probs[order]


def _places(table: Sequence[float], further: np.ndarray | int, requests: int) -> np.ndarray:
    """The places in a table of costs of steps with so many further rows in all."""
    parts = np.ceil(PARTS * np.asarray(further) / requests)
    return np.minimum(parts, len(table) - 1).astype(int)
