"""How often drafts are right: what is believed of a pair, and of the request at hand.

A drafter is mostly right where the target itself has no doubt, and mostly wrong where it has. The
target's certainty of the last token is known when the next round begins, at no cost, so the belief
about the first slot is one for each of a few levels of it. The slots after it are right or wrong
together, so theirs are about slot j when the slots before it are right.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from math import log

# Log-probability of the target's favourite, where one level of certainty ends and the next begins.
BORDERS = tuple(log(p) for p in (0.5, 0.8, 0.95, 0.99, 0.999))
HOPES = (0.3, 0.4, 0.5, 0.7, 0.9, 0.95)  # for slot 1 at each level, before anything is known,
UNKNOWN, BLIND_HOPE = len(HOPES), 0.8  # and where the target's certainty is not known
LATER_HOPE = 0.9  # for the slots after it,
HOPE_WEIGHT = 2.0  # and how many rounds such a belief counts for
NEIGHBOUR_WEIGHT = 4.0  # how many rounds the slot before counts for in the belief about a slot
MEMORY = 0.98  # a round's weight against the next one's: the last 50 or so count
FADING = 0.998  # what a plain round leaves of the evidence, so that hope brings another try
MOOD_MEMORY, MOOD_WEIGHT = 0.8, 2.0  # of a request: its last five rounds count
SUREST = 0.98


def level(certainty: float | None) -> int:
    """The level of a log-probability of the target's favourite token; None: not known."""
    return UNKNOWN if certainty is None else bisect(BORDERS, certainty)


class Beliefs:
    """What is believed of a drafter, from all rounds with it.

    Args:
        slots: of its widest block.
    """

    def __init__(self, slots: int) -> None:
        self._hopes = (*HOPES, BLIND_HOPE)
        self._tried = [0.0] * len(self._hopes)  # rounds that drafted at a level; old ones count
        self._hit = [0.0] * len(self._hopes)  # less; and those whose first slot was right
        self._reached = [0.0] * max(0, slots - 1)  # rounds in which slot j + 2 was looked at,
        self._right = [0.0] * max(0, slots - 1)  # and was right

    def first(self, at: int) -> float:
        """How often slot 1 is right at a level of certainty."""
        return (self._hit[at] + HOPE_WEIGHT * self._hopes[at]) / (self._tried[at] + HOPE_WEIGHT)

    def later(self) -> list[float]:
        """How often slots 2, 3, ... are right when those before them are."""
        rates, belief, weight = [], LATER_HOPE, HOPE_WEIGHT
        for reached, right in zip(self._reached, self._right, strict=True):
            belief = (right + weight * belief) / (reached + weight)
            weight = NEIGHBOUR_WEIGHT
            rates.append(belief)
        return rates

    def learn(self, at: int, drafted: int, accepted: int) -> None:
        """Take in a draft of so many slots, of which the first ones were right."""
        self._tried[at] = MEMORY * self._tried[at] + 1
        self._hit[at] = MEMORY * self._hit[at] + (accepted > 0)
        if accepted and drafted > 1:
            self._reached = [MEMORY * rounds for rounds in self._reached]
            self._right = [MEMORY * rounds for rounds in self._right]
            for slot in range(min(accepted, drafted - 1)):
                self._reached[slot] += 1
                self._right[slot] += slot + 1 < accepted

    def pass_by(self, at: int) -> None:
        """Nothing was drafted at this level: what is known of it is a little older now."""
        self._tried[at] *= FADING
        self._hit[at] *= FADING


class Mood:
    """How a request's last drafts went, against what was believed of them."""

    def __init__(self) -> None:
        self._believed, self._right = 0.0, 0.0

    def first(self, belief: float) -> float:
        """The belief about slot 1, corrected by how its like did in this request."""
        factor = (self._right + MOOD_WEIGHT) / (self._believed + MOOD_WEIGHT)
        return min(max(SUREST, belief), belief * factor)

    def learn(self, belief: float, right: bool) -> None:
        """Take in a draft whose first slot was believed in so much, and whether it was right."""
        self._believed = MOOD_MEMORY * self._believed + belief
        self._right = MOOD_MEMORY * self._right + right

    def pass_by(self) -> None:
        """Nothing was drafted."""
        self._believed *= MOOD_MEMORY
        self._right *= MOOD_MEMORY


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """What rounds of 1, 2, ... rows bring when slots 1, 2, ... are right so often."""
    tokens, path = [1.0], 1.0
    for rate in rates:
        path *= rate
        tokens.append(tokens[-1] + path)
    return tokens
