"""Rows for the requests of a batch: the likeliest drafted rows of all, until the next costs more.

A row is accepted with the probability of its path, which falls along a draft. So the best n rows of
a batch are the n likeliest of all requests. One pass over them, likeliest first, finds the number
that brings the most tokens per second. It may be none: then the batch decodes plainly.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from ..policy.draft_policy import DraftPolicy
from ..policy.planner import PROBE_ROWS, DraftCandidate, plain_steps_after
from ..policy.step_costs import CHAIN_LENGTHS

MIN_SPEEDUP = 1.05  # over plain batching: texts that draft end one by one, so batches are smaller
FEATURES_PER_ROW = 10  # features that a network may read first for the price of a row,
AMORTIZED_TOKENS = 64  # which is spread over so many tokens of a text
MIN_REQUEST_SPEED = 0.7  # of plain batching's speed that is expected of every request


class RowAllocator:
    """Decides how many rows of each request a shared step verifies.

    Args:
        policy: of the pair, whose costs shared steps use and correct.
        clock: in seconds.
    """

    def __init__(self, policy: DraftPolicy, clock: Callable[[], float] = time.perf_counter) -> None:
        self._policy, self._clock = policy, clock
        self._plain_left = self._in_vain = 0  # see `AdaptivePlanner`
        self._started: float | None = None  # the time of `allocate`; None for a pipelined step
        self._ended = 0.0
        self._kind, self._further, self._cost = "chain", 0, 1.0  # rows beside the plain ones
        self._timed, self._count = True, 0  # whether its time tells its cost; of the last requests

    @property
    def can_pipeline(self) -> bool:
        """Whether more plain steps are decided."""
        return self._plain_left > 1

    def allocate(self, candidates: Sequence[DraftCandidate]) -> list[int]:
        """Rows of each request, the anchor included.

        Args:
            candidates: what each of the requests that share the step could have verified.
        """
        self._started = self._clock()
        count, costs = len(candidates), self._policy.costs
        rows = [1 + len(one.path_probs) if one.required else 1 for one in candidates]
        networks = any(one.propose is None for one in candidates if one.path_probs)
        self._kind, required = "chain" if networks else "lookup", sum(rows) - count
        chosen = list[int]()
        if self._plain_left == 0 and not costs.needs_plain_step(count):
            chosen = self._best(candidates, required)
            self._in_vain = 0 if required + len(chosen) else self._in_vain + 1
            self._plain_left = plain_steps_after(self._in_vain)
        for owner in chosen:
            rows[owner] += 1
        self._further = required + len(chosen)
        self._cost = costs.cost(self._kind, count + self._further, count)
        unread = sum(one.unread for one, own in zip(candidates, rows, strict=True) if own > 1)
        self._timed = unread <= sum(rows)
        return rows

    def observe(self, tokens: Sequence[int], pipelined: bool) -> None:
        """Take in the tokens a step brought each request; `pipelined` if the next has begun."""
        now, started = self._clock(), self._started
        was_pipelined, self._started = started is None, None
        if was_pipelined:
            started, self._further, self._cost, self._timed = self._ended, 0, 1.0, True
        self._ended = now
        if not tokens or started is None:
            return
        # A step that only starts or only ends a pipeline takes two forwards, or part of one. And
        # where requests come or go, their caches move.
        count, before = len(tokens), self._count
        self._timed &= pipelined == was_pipelined and count == before
        seconds, self._count = now - started if self._timed else None, count
        if not self._further:
            self._plain_left = max(0, self._plain_left - 1)
        self._policy.costs.observe(self._kind, count + self._further, seconds, count)
        self._policy.count(self._further > 0, sum(tokens) / count, self._cost)

    def _best(self, candidates: Sequence[DraftCandidate], required: int) -> list[int]:
        """Whose rows bring the most tokens per second beside the required ones, a number each."""
        owners, probs = _ranked(candidates)
        if not len(probs):
            return []
        costs, count, least = self._policy.costs, len(candidates), len(candidates) + required
        totals = CHAIN_LENGTHS[
            bisect_right(CHAIN_LENGTHS, least) : bisect_left(CHAIN_LENGTHS, least + len(probs))
        ]
        unread, left = np.array([(one.unread, one.left) for one in candidates]).T
        found: list[tuple[float, float, list[int]]] = []  # tokens per cost, expected loss, owners
        for total in (*totals, least + len(probs)):
            own = owners[: total - least]
            brought = 1 + np.bincount(own, probs[: total - least], count)
            mean, reads = float(brought.mean()), unread[brought > 1].sum() / FEATURES_PER_ROW
            cost = costs.cost(self._kind, total + int(reads * mean / AMORTIZED_TOKENS), count)
            if (brought >= MIN_REQUEST_SPEED * np.minimum(cost, left)).all():  # or of its rest
                loss = costs.cost(self._kind, total + int(reads), count) - mean
                found.append((mean / cost, loss, own.tolist()))
        speed, _, best = max(found, default=(0.0, 0.0, []))
        if speed * costs.cost(self._kind, least, count) > MIN_SPEEDUP:
            return best
        # Of what may be tried, the best of these or one request's draft, the one that loses least.
        one = min(owners.tolist(), key=unread.__getitem__)
        rates = probs[owners == one][:PROBE_ROWS]
        cost = costs.cost(
            self._kind, least + len(rates) + int(unread[one] / FEATURES_PER_ROW), count
        )
        found.append((0.0, cost - 1 - rates.sum() / count, [one] * len(rates)))
        _, loss, best = min(found, key=lambda each: each[1])
        return best if self._policy.should_probe(1 + loss) else []


def _ranked(candidates: Sequence[DraftCandidate]) -> tuple[np.ndarray, np.ndarray]:
    """The rows that may be had, likeliest first: whose each is, and its path's probability."""
    optional = [() if one.required else one.path_probs for one in candidates]
    owners = np.repeat(np.arange(len(optional)), [len(probs) for probs in optional])
    probs = np.array([one for each in optional for one in each])
    order = np.argsort(-probs, kind="stable")  # a request's rows stay in their order
    return owners[order], probs[order]
