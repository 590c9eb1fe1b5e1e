"""How often drafts are right: what is believed of a pair, by how sure its target was lately.

A drafter is mostly right where the target itself has no doubt, and mostly wrong where it has. One
token says little of that, the last few say much: a token without doubt may be the end of a word in
the middle of a text that the drafter knows nothing about. Their certainty is known when the next
round begins, at no cost. So the belief about the first slot is one for each of a few levels of it.
The slots after it are right or wrong together, so theirs are about slot j when the slots before it
are right, and a draft says something of them at every level, the less the farther it is away.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from typing import Any

import numpy as np

RECENT = 0.75  # a token's weight against the next one's in the target's certainty
# The least certainty of each level; and before anything is known, how often slot 1 is right there,
# and each slot after it if those before it are.
LEVELS = (
    (0.0, 0.25, 0.5),
    (0.8, 0.35, 0.55),
    (0.92, 0.45, 0.65),
    (0.97, 0.7, 0.85),
    (0.99, 0.9, 0.92),
    (0.998, 0.97, 0.95),
)
BORDERS = tuple(least for least, _, _ in LEVELS[1:])
SUREST = len(LEVELS) - 1  # where the target has no doubt
UNKNOWN = len(LEVELS)  # where its certainty is not known
FIRST = (*(first for _, first, _ in LEVELS), 0.8)
LATER = (*(later for _, _, later in LEVELS), 0.9)
HOPE = 0.7  # for slot 1 at any level, where it is asked what is worth a try
PRIOR_WEIGHT = 2.0  # how many rounds all these count for
NEIGHBOUR_WEIGHT = 4.0  # how many rounds the slot before counts for in the belief about a slot
ELSEWHERE = 0.25  # what a draft counts for a level away, for the slots after the first
MEMORY = 0.98  # a round's weight against the next one's: the last 50 or so count
FADING = 0.998  # what a plain round leaves of the evidence, so that hope brings another try
STEADY, CALM = 4.0, 0.94  # of a request's mood: what none weighs, what a token leaves of one
WARMTHS = (0.0, 0.5, 1.0)  # the highest temperature of each class; the last class has no end

# By level: what a draft at another one counts there, in full where one of them is not known; and
# what it leaves there of those before it.
_COUNTS = [
    [1.0 if UNKNOWN in (at, other) else ELSEWHERE ** abs(at - other) for at in range(len(FIRST))]
    for other in range(len(FIRST))
]
_FADES = [[MEMORY**count for count in of] for of in _COUNTS]


class Certainty:
    """How sure a target was of a text's last few tokens.

    The text before an answer is given, so it counts as certain, and an answer's first tokens are
    believed to be of a kind with it: openings are few, and a drafter knows them even where the
    target hesitates between several.

    Attributes:
        mean: of the probabilities of its favourites, the last ones counting most; None as long as
            nothing is known.
    """

    def __init__(self) -> None:
        self.mean: float | None = None

    @property
    def doubt(self) -> float:
        """What is missing to 1; 0 as long as nothing is known."""
        return 0.0 if self.mean is None else 1 - self.mean

    def take(self, tokens: int, last: float | None) -> None:
        """The text went on by so many tokens, all but the last of which were drafted.

        Drafts that were right count as certain. `last` is the probability of the target's favourite
        where it chose the last one; None where nobody asked for it.
        """
        if last is not None:
            self.mean = 1 - RECENT**tokens * self.doubt - (1 - RECENT) * (1 - last)


def level(certainty: float | None) -> int:
    """The level of a mean probability of the target's favourites; None: not known."""
    return UNKNOWN if certainty is None else bisect(BORDERS, certainty)


def warmth(temperature: float) -> int:
    """The class of a temperature: how often drafts are right at one says little of another."""
    return bisect_left(WARMTHS, temperature)


class Beliefs:
    """What is believed of a drafter in one class of temperatures, from all rounds with it.

    Args:
        slots: of its widest block.
        evidence: what others of as many slots knew, see `evidence`; it counts for `weight` rounds
            a round. Raises `ValueError`, or what Python raises, for anything else.

    Attributes:
        drafts: how many it has learnt from itself.
    """

    def __init__(
        self, slots: int, evidence: Mapping[str, Sequence[Any]] | None = None, weight: float = 1.0
    ) -> None:
        self.drafts = 0
        self._tried = [0.0] * len(FIRST)  # rounds that drafted at a level; old ones count less;
        self._hit = [0.0] * len(FIRST)  # and those whose first slot was right
        # By level, rounds in which slot j + 2 was looked at, and was right. Lists: behind a forward
        # the caches are cold, and there an operation of NumPy's takes longer than these numbers.
        shape = len(FIRST), max(0, slots - 1)
        self._reached: list[list[float]] = np.zeros(shape).tolist()
        self._right: list[list[float]] = np.zeros(shape).tolist()
        self._later: dict[int, list[float]] = {}  # `_slots` by level, of what is counted now
        if evidence is not None:
            pairs = evidence["tried"], evidence["hit"], evidence["reached"], evidence["right"]
            self._tried, self._hit = _part(weight, *pairs[:2], shape[:1])
            self._reached, self._right = _part(weight, *pairs[2:], shape)

    def evidence(self, weight: float = 1.0) -> dict[str, list[Any]]:
        """All that it knows, so weighted: rounds by level, and also by slot after the first."""
        counts = {
            "tried": self._tried,
            "hit": self._hit,
            "reached": self._reached,
            "right": self._right,
        }
        return {name: (weight * np.array(of)).tolist() for name, of in counts.items()}

    def rates(self, at: int) -> list[float]:
        """How often slots 1, 2, ... are right at a level, when those before them are."""
        later = self._later.get(at)  # most rounds ask, and few change what is counted
        if later is None:
            later = self._later[at] = _slots(self._reached[at], self._right[at], LATER[at])
        return [self._first(at, FIRST[at]), *later]

    def hope(self, at: int) -> float:
        """How often slot 1 may be right at a level, for all that is known to the contrary."""
        return self._first(at, max(HOPE, FIRST[at]))

    def _first(self, at: int, prior: float) -> float:
        return (self._hit[at] + PRIOR_WEIGHT * prior) / (self._tried[at] + PRIOR_WEIGHT)

    @property
    def rounds(self) -> float:
        """How many drafts they rest on, old ones counting less."""
        return sum(self._tried)

    def learn(self, at: int, drafted: int, accepted: int) -> None:
        """Take in a draft of so many slots, of which the first ones were right."""
        self.drafts += 1
        self._tried[at] = MEMORY * self._tried[at] + 1
        self._hit[at] = MEMORY * self._hit[at] + (accepted > 0)
        if accepted and drafted > 1:
            looked_at, right = min(accepted, drafted - 1), accepted - 1
            for other, (fade, more) in enumerate(zip(_FADES[at], _COUNTS[at], strict=True)):
                self._reached[other] = _with(self._reached[other], fade, more, looked_at)
                self._right[other] = _with(self._right[other], fade, more, right)
            self._later = {}

    def pass_by(self, at: int) -> None:
        """Nothing was drafted at this level: what is known of it is a little older now."""
        self._tried[at] *= FADING
        self._hit[at] *= FADING


def first_drafts(classes: Mapping[int, Beliefs]) -> list[str]:
    """A line for each class of temperatures that something was drafted at."""
    return [
        f"temperature {_temperatures(at)}: first drafts are right, where the target is unsure "
        "to where it is sure: "
        + " ".join(f"{of.rates(one)[0]:.0%}" for one in range(UNKNOWN))
        + f" (by {of.rounds:.0f} drafts)"
        for at, of in sorted(classes.items())
        if of.rounds >= 1
    ]


def _temperatures(at: int) -> str:
    """What a class of temperatures is called."""
    if at == len(WARMTHS):
        return f"above {WARMTHS[-1]:g}"
    return f"up to {WARMTHS[at]:g}" if at else f"{WARMTHS[at]:g}"


class Mood:
    """How much better or worse drafts of one request are right than is believed of the pair.

    Some texts suit a drafter and some do not, whatever the target's certainty says. So all rates
    are moved by as many nats of odds: by a Newton step of logistic regression for each slot that
    was looked at, and back by a little with each token.
    """

    def __init__(self) -> None:
        self._nats, self._weight = 0.0, 0.0  # and the curvature of the slots so far

    def moved(self, rates: Sequence[float]) -> Iterator[float]:
        """The rates in this mood; most looks ask for one or two of them, so one after another."""
        if not self._nats:
            return iter(rates)
        odds = exp(self._nats)
        return (_at_odds(rate, odds) for rate in rates)

    def learn(self, rates: Sequence[float], drafted: int, accepted: int) -> None:
        """Take in a draft of so many slots, whose rates were believed to be `rates`."""
        for slot, rate in enumerate(rates[: min(drafted, accepted + 1)]):
            now = _at_odds(rate, exp(self._nats))
            self._weight += now * (1 - now)
            self._nats += ((slot < accepted) - now) / (self._weight + STEADY)

    def pass_by(self, tokens: int) -> None:
        """The text went on by so many tokens."""
        kept = CALM**tokens
        self._weight *= kept
        self._nats *= kept


def _at_odds(rate: float, odds: float) -> float:
    """A rate whose odds are so many times as high."""
    return rate * odds / (1 - rate + rate * odds)


def _with(counts: list[float], fade: float, more: float, slots: int) -> list[float]:
    """What is left of counts, and so much more of the first slots."""
    first = [fade * count + more for count in counts[:slots]]
    return first + [fade * count for count in counts[slots:]]


def _slots(reached: list[float], right: list[float], belief: float) -> list[float]:
    """How often slots 2, 3, ... are right, looked at and right so often; `belief` is the first."""
    rates, weight = [], PRIOR_WEIGHT
    for of, hit in zip(reached, right, strict=True):
        belief = (hit + weight * belief) / (of + weight)
        weight = NEIGHBOUR_WEIGHT
        rates.append(belief)
    return rates


def _part(
    weight: float, tried: Sequence[Any], right: Sequence[Any], shape: tuple[int, ...]
) -> tuple[list[Any], list[Any]]:
    """A part of counts of this shape, and of how many of them were right. Raises `ValueError`."""
    of, hit = np.array(tried), np.array(right)
    if not of.shape == hit.shape == shape:
        raise ValueError("other counts")
    if not ((hit >= 0) & (hit <= of) & (of < np.inf)).all():
        raise ValueError("counts that cannot be")
    return (weight * of).tolist(), (weight * hit).tolist()


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """What rounds of 1, 2, ... rows bring when slots 1, 2, ... are right so often."""
    tokens, path = [1.0], 1.0
    for rate in rates:
        path *= rate
        tokens.append(tokens[-1] + path)
    return tokens
