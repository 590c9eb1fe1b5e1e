"""How often drafts are right: acceptance rates per slot, learnt from the steps of all requests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

FIRST = 0.8  # prior rate of slot 1,
LATER = 0.9  # and of each later slot if those before it are right
PRIOR_WEIGHT = 2.0  # drafts that the priors count for
NEIGHBOUR_WEIGHT = 4.0  # drafts that a slot's rate counts for in the estimate of the next slot
OWN_WEIGHT = 8.0  # drafts of one request that the rates of all count for
MEMORY = 0.98  # weight of a draft relative to the next one: about the last 50 count
PLAIN_MEMORY = 0.998  # the same per plain step, so that drafting is tried again some day


class AcceptanceEstimates:
    """Acceptance rate of each slot, given that the slots before it are right.

    Args:
        slots: of the longest draft.

    Attributes:
        rates: [slots].
        path_probs: [slots], how likely each drafted row is accepted: the products of the rates.
    """

    def __init__(self, slots: int) -> None:
        self._tried = [0.0] * slots
        self._right = [0.0] * slots
        self.rates: list[float] = []
        self.path_probs: list[float] = []
        self._estimate()

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens of which the first `accepted` were right."""
        tried = self._tried
        right = self._right
        for slot in range(min(accepted + 1, drafted, len(tried))):
            tried[slot] = MEMORY * tried[slot] + 1
            right[slot] = MEMORY * right[slot] + (slot < accepted)
        self._estimate()

    def fade(self) -> None:
        """Count a plain step: what is known of the first slot grows older."""
        if self._tried:
            self._tried[0] *= PLAIN_MEMORY
            self._right[0] *= PLAIN_MEMORY
            self._estimate()

    def seen_by(self, all_requests: AcceptanceEstimates) -> list[float]:
        """The `path_probs` of one request, whose rates begin as those of all requests."""
        pairs = zip(self._tried, self._right, all_requests.rates, strict=True)
        rates = ((right + OWN_WEIGHT * rate) / (tried + OWN_WEIGHT) for tried, right, rate in pairs)
        return path_probabilities(rates)

    def _estimate(self) -> None:
        """Shrink each slot's own rate towards the slot before it."""
        prior = FIRST
        weight = PRIOR_WEIGHT
        rates = list[float]()
        for slot, (tried, right) in enumerate(zip(self._tried, self._right, strict=True)):
            rates.append((right + weight * prior) / (tried + weight))
            prior, weight = (rates[-1], NEIGHBOUR_WEIGHT) if slot else (LATER, PRIOR_WEIGHT)
        self.rates = rates
        self.path_probs = path_probabilities(rates)


def path_probabilities(rates: Iterable[float]) -> list[float]:
    """How likely each row of a chain is accepted, given the rate of each slot."""
    return list(accumulate(rates, mul))
