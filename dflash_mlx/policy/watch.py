"""Whether rounds take the time that they were measured to take.

Costs are measured once and kept, perhaps on a machine that was busy then. The rounds that are run
anyway say so: where several of one width disagree with the measurement, their own time counts
instead, in proportion for the widths between and beyond them.

A machine's pace changes: it throttles, and other programs come and go. So a round is compared with
those that were run just before it, of whatever width, and not with those of its own width that were
run in another minute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median

import numpy as np

SEEN = 5  # rounds of a width before they count
BELIEVED = 2  # of them that are not quicker than was said, and what was said is believed
LATEST = 15  # rounds of a width that are remembered
RECENT = 2 * SEEN - 1  # rounds of any width that the machine's pace is known by
TOLERANCE = 1.15  # by which widths may disagree with each other before the measurement is wrong


class Watch:
    """How long rounds of each width took, as multiples of what was measured."""

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = {}  # of each width, at the machine's first pace;
        self._typical: dict[int, float] = {}  # their medians, where there are enough of them
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # rounds: rows, multiple
        self._level = 1.0  # what these took, as a multiple of what they took at first
        self._rounds: Counter[int] = Counter()  # of each width
        self.version, self._disagreed = 0, False  # counts the changes of mind; and the last one

    def saw(self, rows: int, seconds: float, measured: float) -> None:
        """A round of so many rows took `seconds`, where `measured` were expected."""
        multiple = seconds / measured
        ratios = self._ratios.setdefault(rows, deque(maxlen=LATEST))
        ratios.append(multiple / self._level)
        typical = median(ratios) if len(ratios) >= SEEN else 0.0
        if typical:  # else it says nothing of the machine yet
            self._typical[rows] = typical
            self._recent.append((rows, multiple))
            self._level = median(each / self._typical[of] for of, each in self._recent)
        self._rounds[rows] += 1
        if self._rounds[rows] % SEEN == 0:
            self._change_mind()

    def _change_mind(self) -> None:
        """What `corrected` says is another thing now, unless the measurement was and is right."""
        before, self._disagreed = self._disagreed, self.disagrees
        self.version += before or self._disagreed

    def is_unknown(self, rows: int, beside: int) -> bool:
        """Whether a width was hardly ever run, while another one was."""
        return len(self._ratios.get(beside, ())) >= SEEN > len(self._ratios.get(rows, ()))

    def deserves_a_try(self, rows: int, beside: int, hears: bool) -> bool:
        """Whether a width `is_unknown`, and what was measured is not to be believed yet.

        It is where a few rounds that were drafted for the purpose, of this width or another one,
        were as dear as measured; but not where the drafter says how sure it is (`hears`), for only
        tries tell what that is worth.
        """
        dear = self._typical.get(beside, 1.0) / TOLERANCE
        tries = (ratios for of, ratios in self._ratios.items() if of not in (1, beside))
        believed = sum(ratio >= dear for ratios in tries for ratio in ratios) >= BELIEVED
        return self.is_unknown(rows, beside) and (hears or not believed)

    def is_off(self, rows: int) -> bool:
        """Whether rounds of a width are known not to take what was measured."""
        factor = self.factor(rows) or 1.0
        return not 1 / TOLERANCE <= factor <= TOLERANCE

    def factors(self) -> dict[int, float]:
        """What rounds take now, of every width that was seen often enough."""
        return {rows: self._typical[rows] * self._level for rows in sorted(self._typical)}

    def factor(self, rows: int) -> float | None:
        """What rounds of one width take now; None where they were not seen often enough."""
        ratio = self._typical.get(rows)
        return None if ratio is None else ratio * self._level

    @property
    def pace(self) -> float:
        """What rounds take now, as a multiple of what was measured: the machine may be busier.

        Of plain rounds where they are known, else of the narrowest that are, where widths disagree,
        and of all where they do not; 1 before the first one.
        """
        if self.disagrees or self.factor(1):
            return next(iter(self.factors().values()))
        every = [ratio for ratios in self._ratios.values() for ratio in ratios]
        return self._level * median(every) if every else 1.0

    @property
    def disagrees(self) -> bool:
        """Whether the measurement is wrong about how widths compare. A busier machine is not."""
        factors = self.factors().values()
        return len(factors) > 1 and max(factors) > TOLERANCE * min(factors)

    def corrected(self, seconds: Sequence[float]) -> list[float]:
        """Measured seconds of rounds of 1, 2, ... rows, as the rounds themselves say."""
        if not self.disagrees:
            return list(seconds)
        every = self.multiples(np.arange(1, len(seconds) + 1))
        return [float(s * f) for s, f in zip(seconds, every, strict=True)]

    def multiples(self, rows: np.ndarray) -> np.ndarray:
        """What rounds of these widths take, as multiples of what was measured; 1 if it is right."""
        if not self.disagrees:
            return np.ones(len(rows))
        factors = self.factors()
        multiples: np.ndarray = np.exp(
            np.interp(rows, list(factors), np.log(list(factors.values())))
        )
        return multiples


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
