"""Allocates the rows of a shared step to its requests, the most probable drafted rows first.

A row is accepted with the probability of its path, which falls along a draft. So the best n rows of
a batch are the n most probable ones of all its requests. One pass over the rows in this order finds
the number of rows that yields the most tokens per second. If that number is 0, the batch decodes
plainly.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from ..policy.draft_policy import DraftPolicy
from ..policy.planner import PROBE_ROWS, DraftCandidate, plain_steps_after
from ..policy.step_costs import CHAIN_LENGTHS

# Drafting has to promise this speed, relative to plain batching. The margin pays for smaller
# batches later, because texts that draft end at different times.
MIN_SPEEDUP = 1.05
# This many unread features cost as much as one row.
FEATURES_PER_ROW = 10
# The cost of reading features is spread over this many tokens of a text.
AMORTIZED_TOKENS = 64
# Every request should decode at this speed or more, relative to plain batching.
MIN_REQUEST_SPEED = 0.7


class RowAllocator:
    """Decides how many rows of each request a shared step verifies.

    Args:
        policy: the policy of the pair. Shared steps use its costs and correct them.
        clock: returns the time in seconds.
    """

    def __init__(self, policy: DraftPolicy, clock: Callable[[], float] = time.perf_counter) -> None:
        self._policy = policy
        self._clock = clock
        self._plain_left = 0  # plain steps that are decided but not taken
        self._plain_decisions = 0  # decisions for plain steps in a row
        self._started: float | None = None  # the time of `allocate`; None for a pipelined step
        self._ended = 0.0
        self._kind = "chain"
        self._drafted_rows = 0  # drafted rows of the step
        self._cost = 1.0  # expected cost of the step, in plain steps
        self._timed = True  # whether the step's time tells its cost
        self._count = 0  # requests in the last step

    @property
    def can_pipeline(self) -> bool:
        """Whether the next step is already known to be plain."""
        return self._plain_left > 1

    def allocate(self, candidates: Sequence[DraftCandidate]) -> list[int]:
        """Return the number of rows of each request, the anchor included.

        Args:
            candidates: what each request that shares the step offers to verify.
        """
        self._started = self._clock()
        count = len(candidates)
        costs = self._policy.costs
        rows = [
            1 + len(candidate.path_probs) if candidate.required else 1 for candidate in candidates
        ]
        with_drafts = [candidate for candidate in candidates if candidate.path_probs]
        uses_network = any(candidate.propose is None for candidate in with_drafts)
        self._kind = "chain" if uses_network else "lookup"
        required = sum(rows) - count
        chosen: list[int] = []
        if self._plain_left == 0 and not costs.needs_plain_step(count):
            chosen = self._best(candidates, required)
            self._plain_decisions = 0 if required + len(chosen) else self._plain_decisions + 1
            self._plain_left = plain_steps_after(self._plain_decisions)
        for owner in chosen:
            rows[owner] += 1
        self._drafted_rows = required + len(chosen)
        self._cost = costs.cost(self._kind, count + self._drafted_rows, count)
        unread = sum(
            candidate.unread
            for candidate, row_count in zip(candidates, rows, strict=True)
            if row_count > 1
        )
        self._timed = unread <= sum(rows)  # else the step mostly reads features
        return rows

    def observe(self, tokens: Sequence[int], pipelined: bool) -> None:
        """Record the result of a step.

        Args:
            tokens: how many tokens the step produced for each request.
            pipelined: whether the next step has already started.
        """
        now = self._clock()
        started = self._started
        was_pipelined = started is None
        self._started = None
        if was_pipelined:
            started = self._ended
            self._drafted_rows = 0
            self._cost = 1.0
            self._timed = True
        self._ended = now
        if not tokens or started is None:
            return
        # The time of a step that starts or ends a pipeline covers two forwards, or part of one. The
        # caches of requests that come or go move in their first or last step.
        count = len(tokens)
        before = self._count
        self._timed &= pipelined == was_pipelined and count == before
        seconds = now - started if self._timed else None
        self._count = count
        if not self._drafted_rows:
            self._plain_left = max(0, self._plain_left - 1)
        self._policy.costs.observe(
            self._kind, rows=count + self._drafted_rows, seconds=seconds, requests=count
        )
        self._policy.count(self._drafted_rows > 0, sum(tokens) / count, self._cost)

    def _best(self, candidates: Sequence[DraftCandidate], required: int) -> list[int]:
        """Choose the optional rows that yield the most tokens per second.

        Returns the owner of each chosen row: the index of its request. The `required` rows are
        verified in any case.
        """
        owners, probs = _ranked(candidates)
        if not len(probs):
            return []
        costs = self._policy.costs
        count = len(candidates)
        least = len(candidates) + required
        most = least + len(probs)
        shortest = bisect_right(CHAIN_LENGTHS, least)
        longest = bisect_left(CHAIN_LENGTHS, most)
        totals = CHAIN_LENGTHS[shortest:longest]  # numbers of rows to try, besides `most`
        unread = np.array([candidate.unread for candidate in candidates])
        left = np.array([candidate.left for candidate in candidates])
        options: list[tuple[float, float, list[int]]] = []  # tokens per cost, expected loss, owners
        for total in (*totals, most):
            chosen = owners[: total - least]
            chosen_probs = probs[: total - least]
            # The expected tokens of each request: one, and one for each accepted row.
            tokens = 1 + np.bincount(chosen, weights=chosen_probs, minlength=count)
            mean = float(tokens.mean())
            reads = unread[tokens > 1].sum() / FEATURES_PER_ROW  # in rows, for those that draft
            cost = costs.cost(self._kind, total + int(reads * mean / AMORTIZED_TOKENS), count)
            # A request that is about to end cannot produce more than the tokens that are left.
            if (tokens >= MIN_REQUEST_SPEED * np.minimum(cost, left)).all():
                loss = costs.cost(self._kind, total + int(reads), count) - mean
                options.append((mean / cost, loss, chosen.tolist()))
        speed, _, best = max(options, default=(0.0, 0.0, []))
        if speed * costs.cost(self._kind, least, count) > MIN_SPEEDUP:
            return best
        # A probe takes the option that loses least: one of these, or a draft of the request that
        # has the fewest features to read.
        owner = min(owners.tolist(), key=unread.__getitem__)
        probe_probs = probs[owners == owner][:PROBE_ROWS]
        reads = int(unread[owner] / FEATURES_PER_ROW)
        cost = costs.cost(self._kind, least + len(probe_probs) + reads, count)
        probe_loss = cost - 1 - probe_probs.sum() / count
        options.append((0.0, probe_loss, [owner] * len(probe_probs)))
        _, loss, best = min(options, key=lambda option: option[1])
        return best if self._policy.should_probe(1 + loss) else []


def _ranked(candidates: Sequence[DraftCandidate]) -> tuple[np.ndarray, np.ndarray]:
    """Sort the optional rows of all requests by probability, the most probable first.

    Returns the index of each row's request, and the probability of its path.
    """
    optional = [() if candidate.required else candidate.path_probs for candidate in candidates]
    owners = np.repeat(np.arange(len(optional)), [len(probs) for probs in optional])
    probs = np.array([prob for path_probs in optional for prob in path_probs])
    order = np.argsort(-probs, kind="stable")  # a request's rows stay in their order
    return owners[order], probs[order]
