"""What drafting may lose: a bound for each request, in units of a plain step's time.

Every step is booked against plain decoding. A long-term balance limits the loss of the whole
answer. A second balance, whose debts fade, decides when the next draft may be tried after a loss.
"""

from __future__ import annotations

from collections.abc import Sequence

CREDIT = 6.0  # plain steps that a request may lose in all,
ALLOWANCE = 0.01  # plus this share of its tokens
CHEAP = 0.8  # a step may always lose this much where there is no debt
# expected loss of the first draft, and per token so far, that is allowed,
FIRST = 0.5
SHARE = 0.02
MOST = 1.0  # up to this much
FADING = 0.92  # what remains of a debt after a token
SAVINGS = 10.0  # the most gain that is remembered


class Budget:
    """One request's budget.

    Attributes:
        recent: gained (or lost) by drafting of late; losses fade.
        max_cost: the highest cost that a step may have at all.
        free_cost: the cost up to which a step needs no promise of success.
        max_expected_loss: the loss that may be expected of a dearer step.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._balance = 0.0
        self.recent = 0.0
        self.record(cost=0.0, tokens=0)

    def record(self, cost: float, tokens: float) -> None:
        """Book a step that cost so many plain steps and brought so many tokens."""
        self._tokens += tokens
        gain = tokens - cost
        self._balance = min(SAVINGS, self._balance + gain + ALLOWANCE * tokens)
        if self.recent < 0:
            self.recent *= FADING**tokens
        self.recent = min(SAVINGS, self.recent + gain)
        self.max_cost = 1 + CREDIT + self._balance
        self.free_cost = 1 + CHEAP + min(0.0, self.recent)
        self.max_expected_loss = min(MOST, FIRST + SHARE * self._tokens) + self.recent


def expected_loss(path_probs: Sequence[float], cost: float) -> float:
    """Plain steps that a step is expected to lose: the mean of max(0, cost - tokens).

    Args:
        path_probs: how likely each drafted row is accepted, falling.
        cost: of the step.
    """
    loss = cost - 1
    tokens = 1
    for probability in path_probs:
        if tokens >= cost:
            break
        loss -= probability * min(1.0, cost - tokens)
        tokens += 1
    return loss
