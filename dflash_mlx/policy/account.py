"""What drafting may cost: an account of what it brought against plain decoding.

It books what each round brought against what plain decoding would have taken for it, and what the
account cannot pay for is not drafted; so however wrong an estimate is, drafting never costs more
than `CREDIT` plain tokens and `ALLOWANCE` of the rest. A text begins with a part of that credit,
for a short answer has little to pay with.
"""

from __future__ import annotations

CREDIT = 6.0  # plain tokens that may be lost before drafting has paid anything back,
FIRST_CREDIT, CREDIT_RISE = 1.6, 0.3  # of these at once, and more with each token
ALLOWANCE = 0.01  # and the share of all tokens that may be lost in the long run
SAVINGS = 10.0  # plain tokens gained that the account remembers at most


class Account:
    """By how much drafting is ahead of plain decoding."""

    def __init__(self) -> None:
        self._ahead, self._tokens = 0.0, 0.0  # both in plain tokens

    @property
    def affordable(self) -> float:
        """What a round may cost, in rounds of plain decoding."""
        credit = min(CREDIT, FIRST_CREDIT + CREDIT_RISE * self._tokens)
        return credit + self._ahead + 1

    def book(self, cost: float, tokens: float) -> None:
        """Take in a round: what it cost, and the tokens it brought, of plain rounds either."""
        self._tokens += tokens
        self._ahead = min(SAVINGS, self._ahead + (1 + ALLOWANCE) * tokens - cost)
