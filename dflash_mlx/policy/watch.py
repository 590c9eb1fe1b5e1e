"""Whether rounds take the time that they were measured to take.

Costs are measured once and kept, perhaps on a machine that was busy then. The rounds that are run
anyway say so: where several of one width disagree with the measurement, their own time counts
instead, in proportion for the widths between and beyond them. A measurement that is not wrong is
still off by some percent, as the next start's would be. So where none disagrees, what rounds say is
believed as far as it is more likely than that: the mean of the posterior, where the measurement is
the prior, and rounds are as exact as they agree with one another.

A machine's pace changes: it throttles, and other programs come and go. So a round is compared with
the one just before it, where that had another width, and not with those of its own width that were
run in another minute. What all these steps from width to width say together is a weighted least
squares fit: how much longer than measured each width takes. Steps waver, on some machines by a
third; so the fit has to differ from the measurement by more than they leave open.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from math import exp, log, pi
from statistics import median

import numpy as np

SEEN = 5  # rounds of a width before they count
BELIEVED = 2  # of them that are not quicker than was said, and what was said is believed
LATEST = 15  # steps between two widths that are remembered, and rounds of one
SELDOM = 32  # rounds at most from one fit to the next; at first as few as widths need to count
RECENT = 2 * SEEN - 1  # rounds of any width that the machine's pace is known by
TOLERANCE = 1.15  # by which widths may disagree with each other before the measurement is wrong,
DOUBT = 3.0  # and as many standard errors
WAVER = 0.06  # of the log of a step, at least
PRIOR = 0.01  # steps that the measurement counts for in what each width is found to take: a few
# widths between which there was one step would be taken to be near one another by more.
# How far off a measurement that is not wrong may be, beside the one of one row: standard deviations
# of logs, of what all drafted widths share, and of each one's own.
SHARED, OWN = 0.03, 0.02


def _latest() -> deque[float]:
    return deque(maxlen=LATEST)


class Watch:
    """How long rounds of each width took, as multiples of what was measured."""

    def __init__(self) -> None:
        # From a round to the next one: the log of how much its multiple grew, by their widths.
        self._steps: dict[tuple[int, int], deque[float]] = defaultdict(_latest)
        # Of drafted rounds: multiples by the pace of the round before.
        self._beside: dict[int, deque[float]] = defaultdict(_latest)
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # rounds: rows, log multiple
        self._rounds: Counter[int] = Counter()  # of each width,
        self._since = 0  # and of all since the last fit,
        self._is_news = False  # which one of them may change
        self._found: dict[int, float] = {}  # logs of what they take, beside one another,
        self._surprise = np.zeros(0)  # and how unlikely that is, for `_off` to make beliefs of
        self._every: list[float] = []  # `multiples` of 1, 2, ... rows, since the last fit
        self.version, self.disagrees = 0, False  # counts the changes of mind

    def saw(self, rows: int, seconds: float, measured: float) -> None:
        """A round of so many rows took `seconds`, where `measured` were expected."""
        if seconds > 0:  # a clock that stands still says nothing
            self._compare(rows, log(seconds / measured))
        self._rounds[rows] += 1
        self._since += 1
        self._is_news |= self._rounds[rows] == SEEN  # it counts from now on
        if self._since >= min(SELDOM, max(SEEN, self._rounds.total() // 4)):
            self._since = 0
            # A fit is dear where rounds are quick: none behind plain rounds alone, of which a step
            # says nothing. Where widths disagree the machine's pace is in what is said of them.
            if self._is_news or self.disagrees:
                self._change_mind()

    def _compare(self, rows: int, multiple: float) -> None:
        """Take in the log of a round's multiple, beside the one of the round before."""
        pace = multiple
        if self._recent:
            before, of_before = self._recent[-1]
            pace = of_before - self._found.get(before, 0.0)
            if before != rows:
                self._steps[before, rows].append(multiple - of_before)
                self._is_news = True
        if rows > 1:
            self._beside[rows].append(exp(multiple - pace))
        self._recent.append((rows, multiple))

    def _change_mind(self) -> None:
        """What `corrected` says is another thing now."""
        widths = sorted(self._rounds)
        found, errors, self._surprise = self._fit(widths)
        self._found = dict(zip(widths, found.tolist(), strict=True))
        known = [at for at, rows in enumerate(widths) if self._rounds[rows] >= SEEN]
        apart = np.abs(found[known, None] - found[known])
        left_open = DOUBT * np.hypot(errors[known, None], errors[known])
        self.disagrees = bool((apart > log(TOLERANCE) + left_open).any())
        self._every, self._is_news = [], False
        self.version += 1

    def _fit(self, widths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The log of what each width takes, beside one another, its standard error, and surprise.

        The surprise is what `_off` turns into what is to be believed of any width.
        """
        at = {rows: place for place, rows in enumerate(widths)}
        steps = [np.array(of) for of in self._steps.values()]
        weights = np.array([len(of) for of in steps], float)
        # A row for each pair of widths: what it says is the second one's log less the first one's.
        # Steps there and back are told apart: a width that differs from the last one's is dearer,
        # either way, and of both together a median would be one or the other.
        pairs = np.zeros((len(steps), len(widths)))
        for row, (first, second) in enumerate(self._steps):
            pairs[row, at[first]], pairs[row, at[second]] = -1.0, 1.0
        normal = PRIOR * np.eye(len(widths)) + pairs.T @ (weights[:, None] * pairs)
        says = np.array([median(of) for of in self._steps.values()])
        found = np.linalg.solve(normal, pairs.T @ (weights * says))
        left = [np.abs(of - fits) for of, fits in zip(steps, pairs @ found, strict=True)]
        # As of a normal one. A fit through few steps leaves nothing, and that says nothing of them.
        # (`np.median` is not used: its first call imports for longer than a round takes.)
        scale = max(WAVER, 1.48 * median(np.concatenate(left).tolist()) if left else 0.0)
        scale *= np.sqrt(weights.sum() / max(1.0, weights.sum() - len(widths) + 1))
        errors = scale / np.sqrt(np.maximum(1.0, np.diag(normal)))
        # Medians waver by more than means. What is off by more than `most` stalled, or disagrees.
        wavers, most = np.diag(scale**2 * pi / 2 / weights), log(TOLERANCE)
        expected = pairs @ _off(widths, widths) @ pairs.T + wavers
        surprise = pairs.T @ np.linalg.solve(expected, np.clip(says, -most, most))
        return found, errors, surprise

    def is_unknown(self, rows: int, beside: int) -> bool:
        """Whether a width was hardly ever run, while another one was."""
        return self._rounds[beside] >= SEEN > self._rounds[rows]

    def deserves_a_try(self, rows: int, beside: int, hears: bool) -> bool:
        """Whether a width `is_unknown`, and what was measured is not to be believed yet.

        It is where a few rounds that were drafted for the purpose, of this width or another one,
        were as dear as measured; but not where the drafter says how sure it is (`hears`), for only
        tries tell what that is worth.
        """
        dear = exp(self._found.get(beside, 0.0)) / TOLERANCE
        tries = (ratios for of, ratios in self._beside.items() if of != beside)
        believed = sum(ratio >= dear for ratios in tries for ratio in ratios) >= BELIEVED
        return self.is_unknown(rows, beside) and (hears or not believed)

    def is_off(self, rows: int) -> bool:
        """Whether rounds of a width are known not to take what was measured."""
        factor = self.factor(rows) or 1.0
        return not 1 / TOLERANCE <= factor <= TOLERANCE

    def factors(self) -> dict[int, float]:
        """What rounds take now, of every width that was seen often enough."""
        level = self._level
        return {
            rows: level * exp(found)
            for rows, found in sorted(self._found.items())
            if self._rounds[rows] >= SEEN
        }

    def factor(self, rows: int) -> float | None:
        """What rounds of one width take now; None where they were not seen often enough."""
        known = rows in self._found and self._rounds[rows] >= SEEN
        return self._level * exp(self._found[rows]) if known else None

    @property
    def _level(self) -> float:
        """What all widths take now, as a multiple of what they are found to take."""
        logs = [multiple - self._found.get(rows, 0.0) for rows, multiple in self._recent]
        return exp(median(logs)) if logs else 1.0

    @property
    def pace(self) -> float:
        """What rounds take now, as a multiple of what was measured: the machine may be busier.

        Of plain rounds where they are known, else of the narrowest that are, where widths disagree,
        and of all where they do not; 1 before the first one.
        """
        if self.disagrees or self.factor(1):
            return next(iter(self.factors().values()))
        return self._level

    def corrected(self, seconds: Sequence[float]) -> list[float]:
        """Measured seconds of rounds of 1, 2, ... rows, as the rounds themselves say."""
        # Asked by every request, at every depth. Where widths disagree, pace counts, and it moves.
        if self.disagrees or len(self._every) != len(seconds):
            self._every = self.multiples(np.arange(1, len(seconds) + 1)).tolist()
        return [s * f for s, f in zip(seconds, self._every, strict=True)]

    def multiples(self, rows: np.ndarray) -> np.ndarray:
        """What rounds of these widths take, as multiples of what was measured.

        Where that disagrees they hold the machine's pace, else they are beside one row's.
        """
        if self.disagrees:
            factors = self.factors()
            logs = np.interp(rows, list(factors), np.log(list(factors.values())))
        else:
            logs = _off(rows, sorted(self._found)) @ self._surprise
        multiples: np.ndarray = np.exp(logs)
        return multiples


def _off(rows: Sequence[int] | np.ndarray, others: Sequence[int]) -> np.ndarray:
    """How far off the costs of widths may have been measured: covariances of logs, [rows, others].

    All of it is beside one row, which is off by nothing.
    """
    of, beside = np.asarray(rows)[:, None], np.asarray(others)
    covariances: np.ndarray = (of > 1) * (beside > 1) * (SHARED**2 + OWN**2 * (of == beside))
    return covariances


class Surcharge:
    """What rounds of one kind take, as a multiple of what was measured for rounds of another.

    Args:
        first: what is believed before enough of them were seen.
    """

    def __init__(self, first: float) -> None:
        self._first, self._ratios = first, deque[float](maxlen=LATEST)

    def saw(self, seconds: float, measured: float) -> None:
        """A round of the kind took `seconds`."""
        self._ratios.append(seconds / measured)

    @property
    def factor(self) -> float:
        """The multiple."""
        return median(self._ratios) if len(self._ratios) >= SEEN else self._first
