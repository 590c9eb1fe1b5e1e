"""What a step costs, in plain steps: a typical curve of the device, corrected by real steps.

Nothing is measured before decoding, so nothing delays the first token, and a busy moment at the
start leaves nothing behind. Real steps are compared with plain ones that ran shortly before or
after them, and old comparisons are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, log, log2

import mlx.core as mx

MOST_ROWS = 64  # of a tree
# Cost of each further row, and of a draft, before any step has run.
GPU, CPU = (0.015, 0.1), (0.08, 0.3)
LENGTHS = (2, 3, 4, 5, 6, 7, 8, 12, 16)  # numbers of rows that a chain may have, besides the most
PARTS = 4  # of a request's row, by which costs of shared steps are known
RECENT = 9  # comparisons that are kept for each number of rows,
FORGOTTEN = 256  # for so many steps
PRIOR_WEIGHT = 1.0  # comparisons that the typical curve counts for
PER_OCTAVE = 0.5  # weight of what is known about half or twice as many rows
LARGEST_RATIO = 4.0  # of a comparison, either way
FRESH = 8  # drafted steps before or after a plain one that are compared with it
# Drafted steps after which a plain one runs to be timed: the first, the next ones, and later.
FIRST, FEW, STALE = 1, 12, 64
PLAIN_SAMPLES = 3


class StepCosts:
    """Costs of a pair's steps, for each kind: "chain", "lookup" (no network drafts) and "tree".

    Args:
        block_size: the most rows of a chain.
        requests: that share a step. Then a table's rows are `PARTS` of a further row per request:
            a step's draft costs as much for a few rows of all requests as for many.
        slot: of a drafter that drafts token by token, what each token is likely to cost.
    """

    def __init__(self, block_size: int, requests: int = 1, slot: float | None = None) -> None:
        row, draft = CPU if mx.default_device() == mx.cpu else GPU
        share = requests / (1 + row * (requests - 1))
        parts, longest = 1, block_size
        if requests > 1:
            parts, longest = PARTS, 1 + PARTS * (block_size - 1)
        row *= share / parts
        chain = CostCurve(longest, row, draft)
        if slot is not None:
            chain = CostCurve(longest, row + slot * share / parts, draft, by_slot=True)
        self._kinds = {
            "chain": chain,
            "lookup": CostCurve(block_size, row, 0.0),
            "tree": CostCurve(max(MOST_ROWS, block_size), row, draft),
        }
        self._plain: deque[float] = deque(maxlen=PLAIN_SAMPLES)
        self._waiting: deque[tuple[str, int, float]] = deque(maxlen=FRESH)  # for a plain step
        self._steps = self._since_plain = 0

    def table(self, kind: str) -> list[float]:
        """Costs of steps of 1, 2, ... rows."""
        return self._kinds[kind].table(self._steps)

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a plain step of late; None before one was timed."""
        return _low_median([*self._plain]) if self._plain else None

    @property
    def needs_plain_step(self) -> bool:
        """Whether the next step should be plain, for too little is known of what one takes."""
        samples = len(self._plain)
        most = FIRST if samples == 0 else FEW if samples < PLAIN_SAMPLES else STALE
        return self._since_plain >= most

    def observe(self, kind: str, rows: int, seconds: float | None) -> None:
        """Take in how long a step of so many rows took; None where that is not known."""
        self._steps += 1
        self._since_plain += 1
        if not seconds or seconds < 0:
            return
        if rows == 1:
            self._plain.append(seconds)
            self._since_plain = 0
        else:
            self._waiting.append((kind, rows, seconds))
        if self._plain and self._since_plain <= FRESH:
            for kind, rows, seconds in self._waiting:
                cost = seconds / _low_median([*self._plain])
                self._kinds[kind].observe(rows, cost, self._steps)
            self._waiting.clear()


class CostCurve:
    """A line of costs, and what real steps say instead.

    Each number of rows is corrected by the median of its own recent steps. Steps of other numbers
    of rows count less, the more they differ: so a machine whose rows are all dearer is found out by
    steps of one length, and one length that is dear on its own spoils no other for long.

    Args:
        rows: the most.
        row, draft: cost of each further row, and of a draft, before any step has run.
        by_slot: whether each drafted token costs so much that the line follows the real steps.
    """

    def __init__(self, rows: int, row: float, draft: float, by_slot: bool = False) -> None:
        self._prior = [1.0, *(1 + draft + row * further for further in range(1, rows))]
        self._row, self._draft, self._by_slot = row, draft, by_slot
        self._seen: dict[int, deque[tuple[int, float]]] = {}  # rows -> (step, cost)
        self._table, self._expires = self._prior, 0

    def table(self, now: int) -> list[float]:
        """Costs of 1, 2, ... rows at a step; no step costs less than a plain one."""
        if now >= self._expires and self._seen:
            self._correct(now)
            self._expires = now + FORGOTTEN // 8
        return self._table

    def observe(self, rows: int, cost: float, now: int) -> None:
        """Take in what a step cost."""
        self._seen.setdefault(rows, deque(maxlen=RECENT)).append((now, cost))
        self._expires = now

    def _correct(self, now: int) -> None:
        medians = []  # rows, samples, and the median of their costs
        for rows, samples in self._seen.items():
            while samples and samples[0][0] < now - FORGOTTEN:
                samples.popleft()
            if samples:
                medians.append((rows, len(samples), _low_median([cost for _, cost in samples])))
        line, known = self._line(medians) if self._by_slot else self._prior, []
        for rows, count, cost in medians:
            ratio = min(LARGEST_RATIO, max(1 / LARGEST_RATIO, cost / line[rows - 1]))
            known.append((log2(rows), count, log(ratio)))
        self._table = [1.0]
        for rows, cost in enumerate(line[1:], 2):
            place, total, weights = log2(rows), 0.0, PRIOR_WEIGHT
            for other, count, ratio in known:
                weight = count * PER_OCTAVE ** abs(other - place)
                total += weight * ratio
                weights += weight
            self._table.append(max(1.0, cost * exp(total / weights)))

    def _line(self, medians: Sequence[tuple[int, int, float]]) -> list[float]:
        """The line through the medians of the costs by rows: least squares, beside the prior."""
        n, nx, nxx, ny, nxy = PRIOR_WEIGHT, 0.0, PRIOR_WEIGHT, 0.0, 0.0
        for rows, count, cost in medians:
            x, y = rows - 1, cost - self._prior[rows - 1]
            n, nx, nxx = n + count, nx + count * x, nxx + count * x * x
            ny, nxy = ny + count * y, nxy + count * x * y
        determinant = n * nxx - nx * nx
        begin = max(0.0, self._draft + (nxx * ny - nx * nxy) / determinant)
        slope = max(0.0, self._row + (n * nxy - nx * ny) / determinant)
        return [1.0, *(1 + begin + slope * further for further in range(1, len(self._prior)))]


def _low_median(values: Sequence[float]) -> float:
    """The median, the lower one of two: a step that stalled only ever takes longer."""
    return sorted(values)[(len(values) - 1) // 2]
