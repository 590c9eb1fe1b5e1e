"""What a step costs, in plain steps: a typical line of the device, corrected by real steps.

One table serves one request and many, for a step's cost goes by its total rows. Nothing is measured
before decoding, so nothing delays the first token, and a busy moment at the start leaves nothing
behind. Real steps are compared with plain ones that ran shortly before or after them, and old
comparisons are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, log, log2

import mlx.core as mx

MOST_ROWS = 64  # of a tree
# Cost of each further row, and of a draft, before any step has run.
GPU = (0.015, 0.1)
CPU = (0.08, 0.3)
# Numbers of rows that chains may have together, besides the most.
LENGTHS = (*range(2, 8), *(size << octave for octave in range(14) for size in (8, 12)))
RECENT = 9  # comparisons that are kept for each number of rows,
FORGOTTEN = 256  # for so many steps
STIFF = 300.0  # how much surer the typical cost of a row is than that of a draft
PRIOR_WEIGHT = 1.0  # comparisons that the typical line counts for
PER_OCTAVE = 0.5  # weight of a measurement at half or twice the row count
LARGEST_RATIO = 4.0  # of a comparison, either way
STALLED = 2.0  # times the typical cost: one such step, unless drafted token by token, moves no line
FRESH = 8  # drafted steps before or after a plain one that are compared with it
# Drafted steps after which a plain one runs to be timed: the first, the next ones, and later.
FIRST = 1
FEW = 12
STALE = 64
PLAIN_SAMPLES = 3


class StepCosts:
    """Costs of a pair's steps, for each kind: "chain", "lookup" (no network drafts) and "tree".

    Args:
        slot: of a drafter that drafts token by token, what each token is likely to cost. Its steps
            are known by the rows of a request, as the longest draft decides.
    """

    def __init__(self, slot: float | None = None) -> None:
        self._row, draft = CPU if mx.default_device() == mx.cpu else GPU
        self._by_slot = slot is not None
        self._kinds = {
            "chain": CostCurve(self._row + (slot or 0.0), draft, 1 if self._by_slot else STIFF),
            "lookup": CostCurve(self._row, 0.0),
            "tree": CostCurve(self._row, draft),
        }
        self._plain: deque[float] = deque(maxlen=PLAIN_SAMPLES)  # seconds, as of one request
        self._requests = 1  # of the last plain step
        self._waiting: deque[tuple[str, int, int, float]] = deque(maxlen=FRESH)  # for a plain step
        self._steps = 0
        self._since_plain = 0

    def cost(self, kind: str, rows: int, requests: int = 1) -> float:
        """The cost of a step of so many requests and rows in all, in plain steps of theirs."""
        return 1.0 if rows <= requests else self.costs(kind, (rows,), requests)[0]

    def costs(self, kind: str, rows: Sequence[int], requests: int = 1) -> list[float]:
        """The cost of each of these numbers of rows, which are more than the requests."""
        places = rows
        plain = 1.0
        if self._by_slot:  # known by the rows of a request
            places = [-(-one // requests) for one in rows]
        elif requests > 1:
            plain = self._plain_line(requests)
        return [max(1.0, cost / plain) for cost in self._kinds[kind].costs(places, self._steps)]

    def _plain_line(self, requests: int) -> float:
        """A plain step of so many requests, typically, in those of one."""
        return 1 + self._row * (requests - 1)

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a plain step of one request of late; None before one was timed."""
        return _low_median(latest) if (latest := [*self._plain]) else None

    def needs_plain_step(self, requests: int = 1) -> bool:
        """Whether the next step should be plain, for too little is known of what one takes."""
        samples = len(self._plain) if self._is_like(requests) else 0
        most = FIRST if samples == 0 else FEW if samples < PLAIN_SAMPLES else STALE
        return self._since_plain >= most

    def _is_like(self, requests: int) -> bool:
        """Whether the last plain step tells what one of so many requests takes."""
        return requests <= 2 * self._requests and self._requests <= 2 * requests

    def observe(self, kind: str, rows: int, seconds: float | None, requests: int = 1) -> None:
        """Take in how long a step of so many rows took; None where that is not known."""
        self._steps += 1
        self._since_plain += 1
        if not seconds or seconds < 0:
            return
        if rows > requests:
            self._waiting.append((kind, rows, requests, seconds))
        else:
            if not self._is_like(requests):
                self._plain.clear()
            self._plain.append(seconds / self._plain_line(requests))
            self._requests = requests
            self._since_plain = 0
        latest = [*self._plain]  # copies: requests in other threads observe, too
        if latest and self._since_plain <= FRESH:
            for kind, rows, requests, seconds in [*self._waiting]:
                if self._is_like(requests):
                    cost = seconds / _low_median(latest)
                    if self._by_slot:
                        rows = -(-rows // requests)
                        cost = cost / self._plain_line(requests)
                    self._kinds[kind].observe(rows, cost, self._steps)
            self._waiting.clear()


class CostCurve:
    """A line of costs, and what real steps say instead.

    Each number of rows is corrected by the median of its own recent steps. Steps of other numbers
    of rows count less, the more they differ: so a machine whose rows are all dearer is found out by
    steps of one length, and one length that is dear on its own spoils no other for long.

    Args:
        row, draft: cost of each further row, and of a draft, before any step has run.
        stiffness: how much surer the cost of a row is than that of a draft.
    """

    def __init__(self, row: float, draft: float, stiffness: float = STIFF) -> None:
        self._prior = self._line = (draft, row)
        self._stiffness = stiffness
        self._seen: dict[int, deque[tuple[int, float]]] = {}  # rows -> (step, cost)
        self._known: list[tuple[float, int, float]] = []  # log2 of rows, samples, log of a ratio
        self._costs: dict[int, float] = {}
        self._expires = 0

    def costs(self, rows: Sequence[int], now: int) -> list[float]:
        """The cost of each number of rows at a step, in plain steps of one row."""
        if now >= self._expires and self._seen:
            self._correct(now)
            self._expires = now + FORGOTTEN // 8
        # another thread may correct them
        costs = self._costs
        line = self._line
        for one in rows:
            if one not in costs:
                place = log2(one)
                total = 0.0
                weights = PRIOR_WEIGHT
                for other, count, ratio in self._known:
                    weight = count * PER_OCTAVE ** abs(other - place)
                    total += weight * ratio
                    weights += weight
                costs[one] = _on(line, one) * exp(total / weights)
        return [costs[one] for one in rows]

    def observe(self, rows: int, cost: float, now: int) -> None:
        """Take in what a step cost."""
        self._seen.setdefault(rows, deque(maxlen=RECENT)).append((now, cost))
        self._expires = now

    def _correct(self, now: int) -> None:
        medians = []  # rows, samples, and the median of their costs
        for rows, samples in [*self._seen.items()]:
            if costs := [cost for step, cost in [*samples] if step >= now - FORGOTTEN]:
                medians.append((rows, len(costs), _low_median(costs)))
        line = self._fit(medians)
        known = []
        for rows, count, cost in medians:
            ratio = min(LARGEST_RATIO, max(1 / LARGEST_RATIO, cost / _on(line, rows)))
            known.append((log2(rows), count, log(ratio)))
        # whole, for other threads
        self._line = line
        self._known = known
        self._costs = {}

    def _fit(self, medians: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
        """The line through the medians of the costs by rows: least squares, beside the prior."""
        n = PRIOR_WEIGHT
        nx = 0.0
        nxx = self._stiffness
        ny = 0.0
        nxy = 0.0
        for rows, count, cost in medians:
            if count == 1 < self._stiffness and cost > STALLED * _on(self._prior, rows):
                continue
            x = rows - 1
            y = cost - _on(self._prior, rows)
            n = n + count
            nx = nx + count * x
            nxx = nxx + count * x * x
            ny = ny + count * y
            nxy = nxy + count * x * y
        determinant = n * nxx - nx * nx
        draft, row = self._prior
        draft = max(0.0, draft + (nxx * ny - nx * nxy) / determinant)
        return draft, max(0.0, row + (n * nxy - nx * ny) / determinant)


def _on(line: tuple[float, float], rows: int) -> float:
    """The cost of a drafted step on a line: of a draft, and of each further row."""
    return 1 + line[0] + line[1] * (rows - 1)


def _low_median(values: Sequence[float]) -> float:
    """The median, the lower one of two: a step that stalled only ever takes longer."""
    return sorted(values)[(len(values) - 1) // 2]
