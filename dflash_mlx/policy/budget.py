"""Limits how much time drafting may lose per request, in units of a plain step.

Every step is compared with plain decoding. A long-term balance limits the loss over the whole
answer. A second balance, whose debts fade, decides when to try the next draft after a loss.
"""

from __future__ import annotations

from collections.abc import Sequence

# A request may lose this many plain steps in total, plus a share of its tokens.
MAX_LOSS = 6.0
LOSS_PER_TOKEN = 0.01
# A step may lose this many plain steps without any expected gain, as long as there is no debt.
FREE_LOSS = 0.8
# The expected loss that a more expensive step may have, in plain steps: at the start of the answer,
# its increase with each token, and its limit.
EXPECTED_LOSS = 0.5
EXPECTED_LOSS_PER_TOKEN = 0.02
MAX_EXPECTED_LOSS = 1.0
# The share of a debt that remains after each token.
DEBT_DECAY = 0.92
# The largest gain that is remembered, in plain steps.
MAX_GAIN = 10.0


class Budget:
    """One request's budget.

    Attributes:
        recent: plain steps that drafting gained recently, negative after losses, which fade.
        max_cost: the highest cost that any step may have.
        free_cost: steps up to this cost are allowed whatever their expected loss.
        max_expected_loss: the highest expected loss of a step that costs more than `free_cost`.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._balance = 0.0
        self.recent = 0.0
        self.record(cost=0.0, tokens=0)

    def record(self, cost: float, tokens: float) -> None:
        """Record a step that cost `cost` plain steps and produced `tokens` tokens."""
        self._tokens += tokens
        gain = tokens - cost
        self._balance = min(MAX_GAIN, self._balance + gain + LOSS_PER_TOKEN * tokens)
        if self.recent < 0:
            self.recent *= DEBT_DECAY**tokens
        self.recent = min(MAX_GAIN, self.recent + gain)
        self.max_cost = 1 + MAX_LOSS + self._balance
        self.free_cost = 1 + FREE_LOSS + min(0.0, self.recent)
        allowed = EXPECTED_LOSS + EXPECTED_LOSS_PER_TOKEN * self._tokens
        self.max_expected_loss = min(MAX_EXPECTED_LOSS, allowed) + self.recent


def expected_loss(path_probs: Sequence[float], cost: float) -> float:
    """The expected loss of a step, in plain steps: the mean of max(0, cost - tokens).

    Args:
        path_probs: the probability that each drafted row is accepted, in falling order.
        cost: the cost of the step, in plain steps.
    """
    loss = cost - 1
    tokens = 1
    for probability in path_probs:
        if tokens >= cost:
            break
        loss -= probability * min(1.0, cost - tokens)
        tokens += 1
    return loss
