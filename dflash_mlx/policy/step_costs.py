"""The cost of a step, in plain steps: a typical line for the device, corrected by real steps.

The same table serves single requests and batches, because the cost depends on the total number of
rows. Nothing is measured before decoding, so nothing delays the first token, and a busy moment at
the start does no lasting harm. Each drafted step is compared with plain steps that ran shortly
before or after it, and old comparisons are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, log, log2
from typing import NamedTuple

import mlx.core as mx

MAX_TREE_ROWS = 64
# The typical cost of each further row, and of drafting, before any step has run.
GPU_COSTS = (0.015, 0.1)
CPU_COSTS = (0.08, 0.3)
# Numbers of rows to consider for a chain in addition to the maximum: 2 to 7, then 8, 12, 16, 24, 32
# and so on.
CHAIN_LENGTHS = tuple(range(2, 8)) + tuple(
    size << octave for octave in range(14) for size in (8, 12)
)
# For each number of rows, this many comparisons are kept, for this many steps.
COMPARISONS = 9
MAX_AGE = 256
# How much more certain the typical cost of a row is than the typical cost of drafting.
STIFFNESS = 300.0
# The typical line counts as much as this many comparisons.
PRIOR_WEIGHT = 1.0
# The weight of a comparison at half or twice the row count.
OCTAVE_WEIGHT = 0.5
# A comparison corrects the line by at most this factor, in either direction.
MAX_CORRECTION = 4.0
# A single step that costs more than this factor times the typical cost has probably stalled: it
# does not move the line, unless the drafter drafts token by token.
STALL_FACTOR = 2.0
# Plain steps are compared with this many drafted steps before and after them.
COMPARED_STEPS = 8
# The number of plain steps that are kept. A plain step runs to be timed after this many drafted
# steps: while none is kept, while fewer than all are kept, and after that.
PLAIN_SAMPLES = 3
STEPS_TO_FIRST_PLAIN = 1
STEPS_TO_NEXT_PLAIN = 12
STEPS_TO_REFRESH_PLAIN = 64


class StepCosts:
    """The costs of a pair's steps, for each kind: "chain", "lookup" (no network) and "tree".

    Args:
        slot: the typical cost of drafting one token, if the drafter drafts token by token; else
            None. The longest draft decides what such a step costs, so these costs are stored by
            rows per request instead of total rows.
    """

    def __init__(self, slot: float | None = None) -> None:
        self._row, draft = CPU_COSTS if mx.default_device() == mx.cpu else GPU_COSTS
        self._by_slot = slot is not None
        chain_row = self._row + (slot or 0.0)
        self._curves = {
            "chain": CostCurve(chain_row, draft, 1 if self._by_slot else STIFFNESS),
            "lookup": CostCurve(self._row, 0.0),
            "tree": CostCurve(self._row, draft),
        }
        # Seconds of recent plain steps, converted to steps of one request.
        self._plain: deque[float] = deque(maxlen=PLAIN_SAMPLES)
        # The number of requests in the last plain step.
        self._requests = 1
        # Drafted steps that wait for a plain step to be compared with.
        self._waiting: deque[DraftedStep] = deque(maxlen=COMPARED_STEPS)
        self._steps = 0
        self._since_plain = 0

    def cost(self, kind: str, rows: int, requests: int = 1) -> float:
        """The cost of a step with this total number of rows, in plain steps of these requests."""
        return 1.0 if rows <= requests else self.costs(kind, (rows,), requests)[0]

    def costs(self, kind: str, rows: Sequence[int], requests: int = 1) -> list[float]:
        """The cost of each number of rows, each of which is larger than the number of requests."""
        plain = 1.0
        if self._by_slot:
            rows = [_rows_per_request(count, requests) for count in rows]
        elif requests > 1:
            plain = self._plain_cost(requests)
        return [max(1.0, cost / plain) for cost in self._curves[kind].costs(rows, self._steps)]

    def _plain_cost(self, requests: int) -> float:
        """The typical cost of a plain step of these requests, in plain steps of one request."""
        return 1 + self._row * (requests - 1)

    @property
    def plain_seconds(self) -> float | None:
        """The recent duration of a plain step of one request; None before one was timed."""
        latest = list(self._plain)  # another thread may append meanwhile
        return _low_median(latest) if latest else None

    def needs_plain_step(self, requests: int = 1) -> bool:
        """Whether the next step should be plain so that its duration can be measured."""
        samples = len(self._plain) if self._is_comparable(requests) else 0
        if samples == 0:
            return self._since_plain >= STEPS_TO_FIRST_PLAIN
        if samples < PLAIN_SAMPLES:
            return self._since_plain >= STEPS_TO_NEXT_PLAIN
        return self._since_plain >= STEPS_TO_REFRESH_PLAIN

    def _is_comparable(self, requests: int) -> bool:
        """Whether the last plain step had a similar number of requests."""
        return requests <= 2 * self._requests and self._requests <= 2 * requests

    def observe(self, kind: str, rows: int, seconds: float | None, requests: int = 1) -> None:
        """Record the duration of a step, or None if it is not known."""
        self._steps += 1
        self._since_plain += 1
        if not seconds or seconds < 0:
            return
        if rows > requests:
            self._waiting.append(DraftedStep(kind, rows=rows, requests=requests, seconds=seconds))
        else:
            if not self._is_comparable(requests):
                self._plain.clear()
            self._plain.append(seconds / self._plain_cost(requests))
            self._requests = requests
            self._since_plain = 0
        if self._plain and self._since_plain <= COMPARED_STEPS:
            self._compare()

    def _compare(self) -> None:
        """Compare the waiting drafted steps with the latest plain steps."""
        # Requests in other threads may append to both queues, so copies are read.
        plain_seconds = _low_median(list(self._plain))
        for step in list(self._waiting):
            if not self._is_comparable(step.requests):
                continue
            rows = step.rows
            cost = step.seconds / plain_seconds
            if self._by_slot:
                rows = _rows_per_request(rows, step.requests)
                cost /= self._plain_cost(step.requests)
            self._curves[step.kind].observe(rows, cost, self._steps)
        self._waiting.clear()


class DraftedStep(NamedTuple):
    """A timed step: its kind, its total rows, its requests, and its duration in seconds."""

    kind: str
    rows: int
    requests: int
    seconds: float


class Correction(NamedTuple):
    """How far the measured cost of a number of rows is from the line.

    Attributes:
        log2_rows: the logarithm of the number of rows.
        samples: the number of measured steps.
        log_ratio: the logarithm of the measured cost, relative to the line.
    """

    log2_rows: float
    samples: int
    log_ratio: float


class CostCurve:
    """The cost of a step as a line over its rows, corrected by measured steps.

    The median of its own recent steps corrects each number of rows. Steps with other numbers of
    rows count less the more they differ. So if every row is more expensive on this machine, steps
    of one length are enough to learn it, and one length that is unusually expensive affects the
    others only for a while.

    Args:
        row, draft: the typical cost of each further row, and of drafting.
        stiffness: how much more certain the cost of a row is than the cost of drafting.
    """

    def __init__(self, row: float, draft: float, stiffness: float = STIFFNESS) -> None:
        self._prior = (draft, row)
        self._line = self._prior
        self._stiffness = stiffness
        self._measured: dict[int, deque[tuple[int, float]]] = {}  # rows -> (step, cost)
        self._corrections: list[Correction] = []
        self._costs: dict[int, float] = {}
        self._expires = 0

    def costs(self, rows: Sequence[int], now: int) -> list[float]:
        """The cost of each number of rows at step `now`, in plain steps of one row."""
        if now >= self._expires and self._measured:
            self._correct(now)
            self._expires = now + MAX_AGE // 8  # old steps are dropped about this often
        # Another thread may replace these attributes at any time.
        costs = self._costs
        line = self._line
        corrections = self._corrections
        for count in rows:
            if count not in costs:
                costs[count] = _cost_on(line, count) * _correction_at(count, corrections)
        return [costs[count] for count in rows]

    def observe(self, rows: int, cost: float, now: int) -> None:
        """Record the cost of a step."""
        self._measured.setdefault(rows, deque(maxlen=COMPARISONS)).append((now, cost))
        self._expires = now

    def _correct(self, now: int) -> None:
        """Fit the line again and compute the corrections."""
        medians = []  # rows, number of samples, and the median of their costs
        for rows, samples in list(self._measured.items()):
            costs = [cost for step, cost in list(samples) if step >= now - MAX_AGE]
            if costs:
                medians.append((rows, len(costs), _low_median(costs)))
        line = self._fit(medians)
        corrections = []
        for rows, count, cost in medians:
            ratio = cost / _cost_on(line, rows)
            ratio = min(MAX_CORRECTION, max(1 / MAX_CORRECTION, ratio))
            corrections.append(Correction(log2(rows), samples=count, log_ratio=log(ratio)))
        # Other threads read these attributes, so each is replaced as a whole.
        self._line = line
        self._corrections = corrections
        self._costs = {}

    def _fit(self, medians: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
        """Fit a line to the medians by weighted least squares, with the typical line as prior."""
        # The sum of the weights n, and the weighted sums of x, x^2, y and xy.
        n = PRIOR_WEIGHT
        nx = 0.0
        nxx = self._stiffness
        ny = 0.0
        nxy = 0.0
        for rows, count, cost in medians:
            may_have_stalled = count == 1 and self._stiffness > 1
            if may_have_stalled and cost > STALL_FACTOR * _cost_on(self._prior, rows):
                continue
            x = rows - 1
            y = cost - _cost_on(self._prior, rows)
            n += count
            nx += count * x
            nxx += count * x * x
            ny += count * y
            nxy += count * x * y
        determinant = n * nxx - nx * nx
        draft, row = self._prior
        draft += (nxx * ny - nx * nxy) / determinant
        row += (n * nxy - nx * ny) / determinant
        return max(0.0, draft), max(0.0, row)


def _correction_at(rows: int, corrections: Sequence[Correction]) -> float:
    """The factor by which the measured costs correct the line at this number of rows."""
    total = 0.0
    weights = PRIOR_WEIGHT
    for correction in corrections:
        distance = abs(correction.log2_rows - log2(rows))
        weight = correction.samples * OCTAVE_WEIGHT**distance
        total += weight * correction.log_ratio
        weights += weight
    return exp(total / weights)


def _cost_on(line: tuple[float, float], rows: int) -> float:
    """The cost of a drafted step on a line (cost of drafting, cost of each further row)."""
    draft, row = line
    return 1 + draft + row * (rows - 1)


def _rows_per_request(rows: int, requests: int) -> int:
    """The number of rows of each request, rounded up."""
    return -(-rows // requests)


def _low_median(values: Sequence[float]) -> float:
    """The median, or the lower of two: a stall makes a step longer, never shorter."""
    return sorted(values)[(len(values) - 1) // 2]
