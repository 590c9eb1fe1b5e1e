"""How many rows each of many requests has verified now: the likeliest first, over all of them.

A request's row j is kept with the probability of its whole path, which never rises with j. So the
best n rows beyond the anchors are the n likeliest of all requests, and what they bring is the sum
of their chances: for every number of rows the best choice is known, and one pass over them finds
the number that brings the most tokens per second. That may be none: plain decoding of all together.

    nobody is left behind   a request's own tokens per second, of its last rounds and this one, stay
                            above `FLOOR` of plain batching's, whatever the others' rows cost it
    never slower            an account, as of one request's rounds (`policy.account`), books what
                            rounds cost and bring against plain batching
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..policy.account import Account
from ..policy.offer import Offer
from ..request import Request
from .costs import SharedCosts

GAIN = 1.02  # what drafting has to promise over plain decoding
FLOOR = 0.9  # of plain batching's speed, for every request,
STANDING, MEMORY = 4.0, 0.95  # over these plain rounds, and about the last 20


class Share(NamedTuple):
    """The rows of a round.

    Attributes:
        rows: of each request, the anchor included.
        cost: of the round, in plain rounds of the same requests.
    """

    rows: list[int]
    cost: float


class Standing:
    """What a request had of its last shared rounds, and what they cost: of plain rounds either."""

    def __init__(self) -> None:
        self.tokens, self.cost = STANDING, STANDING

    def book(self, cost: float, tokens: int) -> None:
        """Take in a round."""
        self.tokens, self.cost = MEMORY * self.tokens + tokens, MEMORY * self.cost + cost


def share(
    offers: Sequence[Offer],
    standings: Sequence[Standing],
    costs: SharedCosts,
    context: int,
    affordable: float,
) -> Share:
    """The rows that bring the most tokens per second.

    Args:
        offers, standings: of the requests.
        costs: of rounds.
        context: tokens before the round, of a request on average.
        affordable: what the round may cost, in plain rounds.
    """
    requests = len(offers)
    rows = [1 + len(offer.chances) * offer.asked for offer in offers]
    of, chances = _candidates(offers)
    # After n candidates, n = 0, 1, ...: the rows, those that are drafted together, and for whom.
    verified = sum(rows) + np.arange(len(of) + 1)
    joint = np.array([offer.draft is None for offer in offers], int)
    asked = np.array([offer.asked and len(offer.chances) > 0 for offer in offers], int) * joint
    drafting = int(asked.sum()) + _after(joint[of] * _first_of_each(of))
    drafted = int((asked * rows).sum()) + _after(joint[of] + joint[of] * _first_of_each(of))
    seconds = costs.verify(verified, requests, context) + costs.draft(drafted, drafting, context)
    cost = seconds / seconds[0]
    gains = (requests + _after(chances)) / requests / cost
    allowed = (cost <= affordable) & (cost <= _bearable(of, chances, standings))
    best = int(np.where(allowed, gains, 0.0).argmax())
    if gains[best] <= GAIN:
        best = 0
    for request in of[:best]:
        rows[request] += 1
    return Share(rows, float(cost[best]))


class SharedRounds:
    """The rows of one round after another."""

    def __init__(self, costs: SharedCosts) -> None:
        self._costs, self._account, self._cost = costs, Account(), 1.0
        self._standings: WeakKeyDictionary[Request, Standing] = WeakKeyDictionary()

    def rows(self, requests: Sequence[Request], offers: Sequence[Offer], context: int) -> list[int]:
        """Of the next round of these requests; `context` as in `share`."""
        standings = [self._standings.setdefault(request, Standing()) for request in requests]
        found = share(offers, standings, self._costs, context, self._account.affordable)
        self._cost = found.cost
        return found.rows

    def observe(self, brought: Sequence[tuple[Request, int]]) -> None:
        """Take in the tokens that the round brought each request."""
        for request, tokens in brought:
            self._standings.setdefault(request, Standing()).book(self._cost, tokens)
        if brought:
            self._account.book(self._cost, sum(tokens for _, tokens in brought) / len(brought))


def everything(offers: Sequence[Offer]) -> list[int]:
    """The rows where nothing is known about costs: all that there are."""
    return [1 + len(offer.chances) for offer in offers]


def _candidates(offers: Sequence[Offer]) -> tuple[np.ndarray, np.ndarray]:
    """The further rows that may be had, likeliest first: whose each is, and its chance."""
    pairs = [
        (at, chance)
        for at, offer in enumerate(offers)
        if not offer.asked
        for chance in offer.chances
        if chance > 0
    ]
    of, chances = np.array([at for at, _ in pairs], int), np.array([c for _, c in pairs], float)
    order = np.argsort(-chances, kind="stable")  # a request's rows stay in their order
    return of[order], chances[order]


def _first_of_each(of: np.ndarray) -> np.ndarray:
    """Which candidates are the first of their request."""
    first = np.zeros(len(of), int)
    first[np.unique(of, return_index=True)[1]] = 1
    return first


def _after(values: np.ndarray) -> np.ndarray:
    """The sum of the first n values, n = 0, 1, ..."""
    return np.concatenate([[0], np.cumsum(values)])


def _bearable(of: np.ndarray, chances: np.ndarray, standings: Sequence[Standing]) -> np.ndarray:
    """What the round may cost after n candidates, so that it leaves no request behind."""
    each = np.zeros((len(of) + 1, len(standings)))
    each[np.arange(1, len(of) + 1), of] = chances
    had = np.array([standing.tokens for standing in standings])
    paid = np.array([standing.cost for standing in standings])
    bearable: np.ndarray = ((had + 1 + each.cumsum(axis=0)) / FLOOR - paid).min(axis=1)
    return bearable
