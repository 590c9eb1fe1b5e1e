"""Acceptance rates per draft slot, learned from the steps of all requests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

# Prior acceptance rates: of slot 1, and of each later slot once the slots before it are accepted.
FIRST_RATE = 0.8
LATER_RATE = 0.9
# The priors count as much as this many drafts.
PRIOR_WEIGHT = 2.0
# A slot's rate counts as much as this many drafts in the estimate of the next slot.
NEIGHBOUR_WEIGHT = 4.0
# The rates of all requests count as much as this many drafts of one request.
SHARED_WEIGHT = 8.0
# The weight of a draft relative to the next one, so that about the last 50 count.
DECAY = 0.98
# The same for each plain step, so that drafting is tried again eventually.
PLAIN_DECAY = 0.998


class AcceptanceEstimates:
    """The acceptance rate of each slot, given that the slots before it were accepted.

    Args:
        slots: the number of slots in the longest draft.

    Attributes:
        rates: [slots].
        path_probs: [slots], the probability that each drafted row is accepted: the products of the
            rates.
    """

    def __init__(self, slots: int) -> None:
        self._tried = [0.0] * slots
        self._right = [0.0] * slots
        self.rates: list[float] = []
        self.path_probs: list[float] = []
        self._estimate()

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` were accepted."""
        tried = self._tried
        right = self._right
        # Slots after the first rejected one were not tried.
        for slot in range(min(accepted + 1, drafted, len(tried))):
            tried[slot] = DECAY * tried[slot] + 1
            right[slot] = DECAY * right[slot] + (slot < accepted)
        self._estimate()

    def fade(self) -> None:
        """Count a plain step, which makes the estimate of the first slot less certain."""
        if self._tried:
            self._tried[0] *= PLAIN_DECAY
            self._right[0] *= PLAIN_DECAY
            self._estimate()

    def seen_by(self, all_requests: AcceptanceEstimates) -> list[float]:
        """The `path_probs` of one request, with the rates of all requests as priors."""
        rates = []
        counts = zip(self._tried, self._right, all_requests.rates, strict=True)
        for tried, right, shared_rate in counts:
            rates.append((right + SHARED_WEIGHT * shared_rate) / (tried + SHARED_WEIGHT))
        return path_probabilities(rates)

    def _estimate(self) -> None:
        """Estimate each slot's rate, with the rate of the slot before it as prior."""
        prior = FIRST_RATE
        weight = PRIOR_WEIGHT
        rates: list[float] = []
        for slot, (tried, right) in enumerate(zip(self._tried, self._right, strict=True)):
            rate = (right + weight * prior) / (tried + weight)
            rates.append(rate)
            if slot == 0:
                prior = LATER_RATE
            else:
                prior = rate
                weight = NEIGHBOUR_WEIGHT
        self.rates = rates
        self.path_probs = path_probabilities(rates)


def path_probabilities(rates: Iterable[float]) -> list[float]:
    """The probability that each row of a chain is accepted, given the rate of each slot."""
    return list(accumulate(rates, mul))
