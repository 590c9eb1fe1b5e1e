"""What drafting may cost a request: an account that begins with next to nothing.

It books what every round brought against what plain decoding would have taken for it. A round may
be drafted if what it is *expected* to lose is there: a share of the tokens so far, and what
drafting is ahead by. So where the target is sure, and drafts are mostly right, whole blocks are
drafted from the first round on; where it is not, the same block has to wait until the answer is
long enough to pay for it, or a narrower one is drafted first if that is cheaper. What cannot lose
more than a part of a token, even if all of it is wrong, may always be tried where nothing is owed;
what can lose more, once that is a small part of the answer.

What is really lost is booked twice. In full, and this limits the loss of the longest answer; and
as a debt that fades with the tokens, and this decides about the next try. A bad start is a reason
to wait for a while, and not for as many tokens as would earn it back. While little is lost in all,
debts go sooner: two cheap drafts that fail say little of the third.
"""

from __future__ import annotations

from collections.abc import Iterable

FIRST = 0.15  # plain tokens that the first round may be expected to lose,
SURE_FIRST = 0.3  # where the target has no doubt: what fails there is bad luck and no bad text;
SHARE = 0.02  # the share of the tokens so far that may be lost besides,
RISK = 0.5  # and both together at most; and what any round may lose, however likely it is to fail,
STAKE = 1.25  # or so much, where `SHARE` of the tokens so far is as much
FADING = 0.92  # what a token leaves of a debt, as the next try sees it,
RELIEF = 0.08  # and what it takes off besides, in plain tokens,
LITTLE = 0.04  # where no more is lost than `RISK` and this share of the tokens, beyond `ALLOWANCE`;
CREDIT = 6.0  # tokens that a request may really lose,
ALLOWANCE = 0.01  # and the share of all its tokens besides
SAVINGS = 10.0  # plain tokens gained that the account remembers at most


class Account:
    """One request's account, in units of a plain token's cost."""

    def __init__(self) -> None:
        self._tokens = 0.0  # of the rounds so far,
        self._ahead = 0.0  # what drafting has gained by them, booked in full,
        self._felt = 0.0  # and as the next try sees it: debts fade

    def affordable(self, rates: Iterable[float], surest: bool = False) -> float:
        """The cost of the dearest round that may be drafted; 1, a plain one's, at least.

        A round of cost c is expected to lose the sum over k < c of P(it brings k tokens) (c - k).
        Between c = k and k + 1 that grows by P(it brings at most k) = 1 - a_1 ... a_k. At worst it
        loses c - 1.

        Args:
            rates: a_1, a_2, ...: how often the slots are right when those before them are.
            surest: whether the target has no doubt.
        """
        risk, cost, path = self._risk(SURE_FIRST if surest else FIRST), 1.0, 1.0
        for rate in rates:
            path *= rate
            if risk <= 1 - path:
                break
            cost, risk = cost + 1, risk - (1 - path)
        if risk > 0 and path < 1:
            cost += risk / (1 - path)
        cost = max(cost, 1 + self._stake + self._felt)
        return max(1.0, min(cost, 1 + CREDIT + self._ahead))

    @property
    def stake(self) -> float:
        """What a round may lose for the sake of what it teaches: what is owed is staked already."""
        return self._stake + min(0.0, self._felt)

    @property
    def _stake(self) -> float:
        """What a request may have at stake, however likely it is to fail."""
        saved = SHARE * (self._tokens + 1) + min(0.0, self._ahead)
        return max(RISK, min(STAKE, saved))

    def _risk(self, first: float = FIRST) -> float:
        """What the next round may be expected to lose."""
        return min(RISK, first + SHARE * (self._tokens + 1)) + self._felt

    @property
    def affordable_together(self) -> float:
        """As `affordable`, of a round that many requests share.

        The luck of many evens out: so what counts is what was lost, not what might be.
        """
        return 1 + CREDIT + self._ahead if self._risk() > 0 else 1.0

    def book(self, cost: float, tokens: float) -> None:
        """Take in what a round cost and brought."""
        self._tokens += tokens
        gain = (1 + ALLOWANCE) * tokens - cost
        self._ahead = min(SAVINGS, self._ahead + gain)
        if self._felt < 0:
            is_little = self._ahead + RISK + LITTLE * self._tokens > 0
            relief = RELIEF * tokens if is_little else 0.0
            self._felt = min(0.0, self._felt * FADING**tokens + relief)
        self._felt = min(SAVINGS, self._felt + gain)
