"""The cost of a step, in plain steps: a typical line for the device, corrected by real steps.

Nothing is measured before decoding, so nothing delays the first token, and a busy moment at the
start does no lasting harm. Each drafted step is compared with plain steps that ran shortly before
or after it, and old comparisons are forgotten.

What a row adds to a step depends on how many requests share it. So each number of requests, rounded
up to a power of two, has costs of its own (`DraftPolicy.costs_of`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, log, log2
from typing import NamedTuple

import mlx.core as mx

MAX_TREE_ROWS = 64
# The typical cost of each further row, of drafting, and of drafting for each further request, in
# plain steps of one request, before any step has run.
GPU_COSTS = (0.015, 0.1, 0.01)
CPU_COSTS = (0.08, 0.3, 0.08)
# Numbers of rows to consider for a chain, besides the maximum.
CHAIN_LENGTHS = (*range(2, 8), *(size << octave for octave in range(14) for size in (8, 12)))
# For each number of rows, this many comparisons are kept.
COMPARISONS = 9
# Comparisons are kept for this many steps of one request, and of several. In a batch it costs more
# to try again what has lost.
MAX_AGE = 256
SHARED_MAX_AGE = 1024
# How much more certain the typical cost of a row is than the typical cost of drafting.
STIFFNESS = 300.0
# The typical line counts as much as this many comparisons.
PRIOR_WEIGHT = 1.0
# The weight of a comparison at half or twice the row count.
OCTAVE_WEIGHT = 0.5
# A comparison corrects the line by at most this factor, in either direction.
MAX_CORRECTION = 4.0
# The typical costs of shared steps are expected to be too high by this factor. So a batch tries a
# draft that seems to gain nothing, and measures its cost; otherwise it would never learn of it.
OPTIMISM = 0.9
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
            None.
        requests: about how many requests share each step. Rows are rows per request, and a plain
            step is a plain step of these requests.
        similar: the costs of another number of requests. These begin with what those learned.
    """

    def __init__(
        self, slot: float | None = None, requests: int = 1, similar: StepCosts | None = None
    ) -> None:
        self._steps = 0
        row, draft, request = CPU_COSTS if mx.default_device() == mx.cpu else GPU_COSTS
        plain = 1 + row * (requests - 1)
        row *= requests / plain
        draft = (draft + request * (requests - 1)) / plain
        self._curves = {
            "chain": CostCurve(
                row + (slot or 0.0) / plain, draft, stiffness=STIFFNESS if slot is None else 1
            ),
            "lookup": CostCurve(row, 0.0),
            "tree": CostCurve(row, draft),
        }
        if requests > 1:
            for kind, curve in self._curves.items():
                curve.expected = OPTIMISM
                curve.max_age = SHARED_MAX_AGE
                if similar is not None:
                    curve.start_like(similar._curves[kind], similar._steps)
        # Seconds of recent plain steps.
        self._plain: deque[float] = deque(maxlen=PLAIN_SAMPLES)
        # Drafted steps that wait for a plain step to be compared with.
        self._waiting: deque[DraftedStep] = deque(maxlen=COMPARED_STEPS)
        self._since_plain = 0

    def cost(self, kind: str, rows: float) -> float:
        """The cost of a step with so many rows per request, in plain steps."""
        return 1.0 if rows <= 1 else self.costs(kind, (rows,))[0]

    def costs(self, kind: str, rows: Sequence[float]) -> list[float]:
        """The cost of each number of rows per request, each of which is above 1."""
        return [max(1.0, cost) for cost in self._curves[kind].costs(rows, self._steps)]

    @property
    def plain_seconds(self) -> float | None:
        """The recent duration of a plain step; None before one was timed."""
        latest = [*self._plain]
        return _low_median(latest) if latest else None

    def needs_plain_step(self) -> bool:
        """Whether the next step should be plain so that its duration can be measured."""
        samples = len(self._plain)
        if samples == 0:
            return self._since_plain >= STEPS_TO_FIRST_PLAIN
        if samples < PLAIN_SAMPLES:
            return self._since_plain >= STEPS_TO_NEXT_PLAIN
        return self._since_plain >= STEPS_TO_REFRESH_PLAIN

    def observe(self, kind: str, rows: float, seconds: float | None) -> None:
        """Record the duration of a step, or None if it is not known."""
        self._steps += 1
        self._since_plain += 1
        if not seconds or seconds < 0:
            return
        if rows > 1:
            self._waiting.append(DraftedStep(kind, rows=rows, seconds=seconds))
        else:
            self._plain.append(seconds)
            self._since_plain = 0
        if self._plain and self._since_plain <= COMPARED_STEPS:
            self._compare()

    def _compare(self) -> None:
        """Compare the waiting drafted steps with the latest plain steps."""
        # Requests in other threads may append to both queues, so copies are read.
        plain_seconds = _low_median([*self._plain])
        for step in [*self._waiting]:
            self._curves[step.kind].observe(step.rows, step.seconds / plain_seconds, self._steps)
        self._waiting.clear()


class DraftedStep(NamedTuple):
    """A timed step: its kind, its rows per request, and its duration in seconds."""

    kind: str
    rows: float
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

    Attributes:
        expected: the factor by which steps are expected to differ from the line.
        max_age: the number of steps for which a comparison is kept.
    """

    expected = 1.0
    max_age = MAX_AGE

    def __init__(self, row: float, draft: float, stiffness: float = STIFFNESS) -> None:
        self._prior = (draft, row)
        self._line = self._prior
        self._stiffness = stiffness
        self._measured: dict[float, deque[tuple[int, float]]] = {}  # rows -> (step, cost)
        self._corrections: list[Correction] = []
        self._costs: dict[float, float] = {}
        self._expires = 0

    def start_like(self, other: CostCurve, now: int) -> None:
        """Start with a line that differs from the typical one as another curve's does now."""
        if other._measured:
            other._correct(now)
        draft, row = self._prior
        other_draft, other_row = other._prior
        learned_draft, learned_row = other._line
        if other_draft:
            draft *= learned_draft / other_draft
        row *= learned_row / other_row
        self._prior = self._line = (draft, row)

    def costs(self, rows: Sequence[float], now: int) -> list[float]:
        """The cost of each number of rows at step `now`, in plain steps."""
        if now >= self._expires and self._measured:
            self._correct(now)
            self._expires = now + self.max_age // 8
        # Another thread may replace these attributes at any time.
        costs = self._costs
        line = self._line
        corrections = self._corrections
        rows = [round(count, 1) for count in rows]  # so that few are remembered
        for count in rows:
            if count not in costs:
                factor = _correction_at(count, corrections, self.expected)
                costs[count] = _cost_on(line, count) * factor
        return [costs[count] for count in rows]

    def observe(self, rows: float, cost: float, now: int) -> None:
        """Record the cost of a step."""
        rows = round(rows) if rows > 1.5 else round(rows, 1)  # so that few are kept
        self._measured.setdefault(rows, deque(maxlen=COMPARISONS)).append((now, cost))
        self._expires = now

    def _correct(self, now: int) -> None:
        """Fit the line again and compute the corrections."""
        medians = []  # rows, number of samples, and the median of their costs
        for rows, samples in [*self._measured.items()]:
            costs = [cost for step, cost in [*samples] if now - step <= self.max_age]
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

    def _fit(self, medians: Sequence[tuple[float, int, float]]) -> tuple[float, float]:
        """Fit a line to the medians by weighted least squares, with the typical line as prior."""
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


def _correction_at(rows: float, corrections: Sequence[Correction], expected: float) -> float:
    """The factor by which the measured costs correct the line at this number of rows.

    `expected` is the factor before any step was measured.
    """
    total = PRIOR_WEIGHT * log(expected)
    weights = PRIOR_WEIGHT
    for correction in corrections:
        distance = abs(correction.log2_rows - log2(rows))
        weight = correction.samples * OCTAVE_WEIGHT**distance
        total += weight * correction.log_ratio
        weights += weight
    return exp(total / weights)


def _cost_on(line: tuple[float, float], rows: float) -> float:
    """The cost of a drafted step on a line (cost of drafting, cost of each further row)."""
    draft, row = line
    return 1 + draft + row * (rows - 1)


def _low_median(values: Sequence[float]) -> float:
    """The median, or the lower of two: a stall makes a step longer, never shorter."""
    return sorted(values)[(len(values) - 1) // 2]
