"""What a round of many requests costs on this machine.

A forward over R rows of B requests, after so much context each, takes

    verify(R) + (B - 1) * s(R / B)

where verify(R) is the forward of one request, and s what one more request takes for its own
attention over as many rows: both at that depth of context, so they hold the keys that are read. Up
to the widest round of one request verify(R) is measured with one; beyond it, with `MANY` requests,
less what these take. What drafts is told apart in the same way.

The many are measured at the shallower depth alone. Each attends to its own keys, so a deeper
context costs all of them what it costs one, as many times as they are: reading it `MANY` times over
takes minutes of a slow machine, and tells the same. Measured once, kept with the costs of the
pair's own rounds (`policy.costs`), never while text is made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..drafter.batch import propose_batch
from ..drafter.protocol import Drafter
from ..policy.costs import Costs, Meanwhile, curve, monotone, pair_costs, rows_up_to
from ..policy.timing import DEPTHS, TOKEN, Round, started, time_rounds
from ..proposal import Proposal
from ..sampling import Sampler
from ..targets.batched import BatchVerifier

if TYPE_CHECKING:
    from ..targets import Target

MANY = 8  # requests that are measured together
ROWS = (1, 2, 4, 8, 16)  # of each
MOST_ROWS = 2048  # of all requests in a round; curves end there

Points = Mapping[int, Mapping[int, float]]  # context -> rows of all requests -> seconds


class SharedCosts:
    """What rounds of many requests cost.

    Args:
        one: rounds of one request, as a `Policy` has them.
        many: rounds of `MANY` requests, by the rows of all together; see `measure_shared`. Of
            several depths the shallowest counts.

    Attributes:
        ahead: see `Costs`; measured of one request, and taken to be that of many.
    """

    def __init__(self, one: Costs, many: Costs) -> None:
        self._verify, self._draft = (
            _Forwards(one.verify, many.verify),
            _Forwards(one.draft, many.draft),
        )
        self._unread, self.ahead = one.unread, one.ahead

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter,
        one: Costs,
        widest: int,
        kv_bits: int | None = None,
        again: bool = False,
        meanwhile: Meanwhile = nullcontext,
    ) -> SharedCosts:
        """The costs of a pair, measured now unless they are in the cache; see `Policy.of`."""
        what = "a round of many requests"
        many, _ = pair_costs(
            target, drafter, widest, kv_bits, again, measure_shared, what, meanwhile
        )
        return cls(one, many)

    def verify(self, rows: np.ndarray, requests: int, context: int) -> np.ndarray:
        """Seconds of forwards over these numbers of rows, of so many requests together."""
        return self._verify.seconds(rows, requests, context)

    def draft(self, rows: np.ndarray, requests: np.ndarray, context: int) -> np.ndarray:
        """Seconds of drafts of these numbers of rows, of so many requests; 0 where none drafts."""
        seconds = self._draft.seconds(np.maximum(rows, 1), np.maximum(requests, 1), context)
        return np.where(requests > 0, seconds, 0.0)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds that drafts take longer which read the features of so many tokens first."""
        return self._unread * tokens


class _Forwards:
    """The forwards of one model, from what was measured with one request and with `MANY`."""

    def __init__(self, one: Points, many: Points) -> None:
        self._one, self._near = one, min(many)
        self._many = {self._near: many[self._near]}
        self._tables: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # by depth

    def seconds(self, rows: np.ndarray, requests: Any, context: int) -> np.ndarray:
        """As of `SharedCosts`; rows rise, and what they take never falls."""
        depth = 1 << max(context, 1).bit_length() - 1
        if depth not in self._tables:  # each round of a text passes the same depths
            self._tables[depth] = self._table(depth)
        alone, has, each = self._tables[depth]
        further = np.interp(rows / requests, has, each)
        seconds = alone[np.minimum(rows, MOST_ROWS) - 1] + (requests - 1) * further
        rising: np.ndarray = np.maximum.accumulate(seconds)
        return rising

    def _table(self, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of one request's 1, 2, ... rows; rows that each of many has, and what it adds."""
        border = max(*map(max, self._one.values()), *map(min, self._many.values()))
        alone, near = (np.array(curve(self._one, at, border)) for at in (depth, self._near))
        has = np.arange(1, MOST_ROWS + 1) / MANY
        deeper = np.interp(np.clip(has, 1, border), np.arange(1, border + 1), alone - near)
        together = np.array(curve(self._many, self._near, MOST_ROWS)) + MANY * deeper
        both = slice(min(MANY, border) - 1, border)  # rows that one request and many can have
        each = np.maximum(0.0, together[both] - alone[both]) / (MANY - 1)
        beyond = np.maximum(alone[-1], together[border:] - (MANY - 1) * each[-1])
        return np.array(monotone([*alone, *beyond])), has[both], each


def measure_shared(
    target: Target, drafter: Drafter, widest: int, kv_bits: int | None = None
) -> Costs:
    """Time the rounds of `MANY` requests together. They draft for texts of one token, repeated."""
    sampler, verifier = Sampler(), BatchVerifier(target)

    def begin(depth: int) -> Round:
        """Rounds of all of them."""
        pairs = [started(target, drafter, depth, kv_bits) for _ in range(MANY)]
        sessions, drafting = [session for session, _ in pairs], [drafts for _, drafts in pairs]

        def play(rows: int) -> tuple[float, float]:
            """Seconds of the verify and of the draft, of so many rows each."""
            clock = time.perf_counter()
            if rows > 1:
                drafted = propose_batch(drafting, [TOKEN] * MANY, [rows] * MANY)
                mx.eval([p.tokens for p in drafted if p and isinstance(p.tokens, mx.array)])
            middle = time.perf_counter()
            proposals = [Proposal([TOKEN] * rows)] * MANY
            answers = verifier.verify(sessions, proposals)
            mx.eval([sampler.decide(proposals[0], logits).values for logits, _ in answers])
            for session in sessions:
                session.commit([0])
            end = time.perf_counter()
            for drafts, (_, taps) in zip(drafting, answers, strict=True):
                drafts.extend(taps[:, :1])
            return end - middle, middle - clock

        return play

    rows = rows_up_to(widest, ROWS)
    verify, draft = time_rounds(target, rows, widest, begin, DEPTHS[:1])
    return Costs(_by_all(verify), _by_all(draft, least=2))


def _by_all(points: Points, least: int = 1) -> dict[int, dict[int, float]]:
    """The same by the rows of all requests, where each has at least so many."""
    return {
        depth: {MANY * rows: each for rows, each in seconds.items() if rows >= least} or {1: 0.0}
        for depth, seconds in points.items()
    }
