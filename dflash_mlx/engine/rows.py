"""How many rows each of many requests has verified now: the likeliest first, over all of them.

A request's row j is kept with the probability of its whole path, which never rises with j. So the
best n rows beyond the anchors are the n likeliest of all requests, and what they bring is the sum
of their chances: for every number of rows the best choice is known, and one pass over them finds
the number that brings the most tokens per second. That may be none: plain decoding of all together.

    nobody is left behind   no round is run that is expected to bring a request less than `FLOOR` of
                            plain batching's speed, unless it is ahead of that by its last rounds;
                            and whatever is expected wrongly, from its first shared round to any
                            other one it had `FLOOR` of that speed, less `CREDIT` tokens
    never slower            an account, as of one request's rounds (`policy.account`), books what
                            rounds cost and bring against plain batching
    as it really is         where rounds say that the costs are wrong, theirs count (`policy.watch`)
    what is doubted         a drafter that says how sure it is of its chains has the round wait for
                            them and the rows chosen anew, where that pays (`policy.confidence`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..policy.account import CREDIT, Account
from ..policy.cuts import Draft
from ..policy.offer import Offer
from ..policy.rest import Rest
from ..policy.watch import Watch
from ..policy.widths import TRIAL_GAIN, TRIAL_ROWS
from ..request import Request
from .costs import SharedCosts

GAIN = 1.02  # what drafting has to promise over plain decoding
DOUBT = 2.0  # how much dearer a plain round may have been measured than it is
FLOOR = 0.9  # of plain batching's speed, for every request
FIRST, MEMORY = 0.4, 0.95  # tokens that it is ahead at first; what a round leaves of such
SLACK = CREDIT - FIRST  # that it may be behind: it loses as many at most as it would alone


class Share(NamedTuple):
    """The rows of a round.

    Attributes:
        rows: of each request, the anchor included.
        cost: of the round, in plain rounds of the same requests.
        width: rows of a request on average, to a doubling; 1 of a plain round alone.
        seconds: that the round takes, as measured; 0 of one of rest, at which nobody looks,
        plain: that a plain one would take,
        drafts: and what of them is drafting.
        trial: whether this width is tried for its cost alone.
    """

    rows: list[int]
    cost: float
    width: int
    seconds: float
    plain: float
    drafts: float
    trial: bool = False


class Standing:
    """How many tokens a request is ahead of `FLOOR` of plain batching: fading, but not a debt."""

    def __init__(self) -> None:
        self.ahead = FIRST

    def book(self, cost: float, tokens: int) -> None:
        """Take in a round, which cost so many plain ones."""
        self.ahead += tokens - FLOOR * cost
        if self.ahead > 0:
            self.ahead *= MEMORY


def share(
    offers: Sequence[Offer],
    standings: Sequence[Standing],
    costs: SharedCosts,
    context: int,
    affordable: float,
    watch: Watch,
    before: Share | None = None,
    ahead: float = 1.0,
) -> Share:
    """The rows that bring the most tokens per second.

    Args:
        offers, standings: of the requests.
        costs: of rounds.
        context: tokens before the round, of a request on average.
        affordable: what the round may cost, in plain rounds.
        watch: what such rounds take, by their width.
        before: the rows for which all is drafted already; None where it is yet to be.
        ahead: what a plain round of these takes that is begun ahead, over one on its own.
    """
    requests = len(offers)
    rows = [1 + len(offer.chances) * offer.asked for offer in offers]
    of, chances = _candidates(offers)
    verified = sum(rows) + np.arange(len(of) + 1)  # rows, after n candidates, n = 0, 1, ...
    drafts, reading = _drafting(offers, rows, of, costs, context)
    verify = costs.verify(verified, requests, context)
    plain = verify[0] + drafts[0]
    if before is not None:
        plain, drafts = before.plain, drafts + before.drafts
    seconds, widths = verify + drafts, _doublings(1 + (verified - verified[0]) / requests)
    multiples = watch.multiples(widths)
    cost = seconds * multiples / (ahead * plain * multiples[0])
    if before is None:
        cost[0] = 1.0  # a plain round is the measure, whether it was begun ahead or not
    tokens = 1 + _after(chances) / requests
    allowed = (cost <= affordable) & (cost <= _bearable(of, chances, standings))
    # What is read now need not be read again: it is to be paid for, and no reason against drafting.
    lasting = cost * (1 - reading / seconds)
    best = int(np.where(allowed, tokens / lasting, 0.0).argmax())
    if tokens[best] * lasting[0] <= GAIN * lasting[best]:
        best = 0
    allowed[0] = tokens[best] * lasting[0] <= DOUBT * lasting[best]  # to be tried: it might win
    hears = any(offer.look is not None for offer in offers)
    tried = _trial(widths, tokens, allowed, best, watch, hears) if before is None else None
    best = best if tried is None else tried
    for request in of[:best]:
        rows[request] += 1
    of_round = float(cost[best]), int(widths[best]), float(seconds[best])
    return Share(rows, *of_round, float(plain), float(drafts[best]), tried is not None)


def _drafting(
    offers: Sequence[Offer],
    rows: Sequence[int],
    of: np.ndarray,
    costs: SharedCosts,
    context: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the drafts made together after n candidates, and what of them is reading first.

    The rows are those that requests have without a candidate, `of` whose each candidate is.
    """
    joint = np.array([offer.draft is None for offer in offers], int)
    asked = np.array([offer.asked and len(offer.chances) > 0 for offer in offers], int) * joint
    begins = _first_of_each(of)  # who has a first candidate is drafted for, the anchor included
    drafting = int(asked.sum()) + _after(joint[of] * begins)
    drafted = int((asked * rows).sum()) + _after(joint[of] * (1 + begins))
    unread = np.array([offer.unread for offer in offers], int) * joint
    reading = costs.read(int((asked * unread).sum()) + _after(unread[of] * begins))
    return costs.draft(drafted, drafting, context) + reading, reading


def _trial(
    widths: np.ndarray,
    tokens: np.ndarray,
    allowed: np.ndarray,
    best: int,
    watch: Watch,
    hears: bool,
) -> int | None:
    """The candidates of a width that is tried for its cost alone, as it was hardly ever run.

    What would bring clearly more, and deserves a try; or plain decoding, which all are compared
    with, where that might win or rounds do not take what was measured. Mostly None.
    """
    width = int(widths[best])
    for trial in (0, int(np.searchsorted(widths, TRIAL_ROWS, "right")) - 1, len(widths) - 1):
        tried = int(widths[trial])
        if trial:
            more = allowed[trial] and tokens[trial] > TRIAL_GAIN * tokens[best]
            worth = more and watch.deserves_a_try(tried, width, hears)
        else:
            might = allowed[0] or watch.is_off(width)
            worth = might and watch.is_unknown(tried, beside=width)
        if worth:
            return trial
    return None


def _doublings(rows: np.ndarray) -> np.ndarray:
    """1, 2, 4, 8, ... at least these: so that rounds of a width are soon enough to be judged."""
    doublings: np.ndarray = 2 ** np.ceil(np.log2(rows)).astype(int)
    return doublings


class SharedRounds:
    """The rows of one round after another.

    Args:
        costs: of rounds.
        clock: what says how long rounds really take.

    Attributes:
        waited: whether this round waited for its drafts, to cut them.
        rest: when requests need not be asked what they could draft.
    """

    def __init__(self, costs: SharedCosts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._costs, self._clock, self._account = costs, clock, Account()
        self._standings: WeakKeyDictionary[Request, Standing] = WeakKeyDictionary()
        self._watches: dict[int, Watch] = {}  # by how many requests there are, to a doubling
        self._share, self._began = Share([], 1.0, 1, 1.0, 1.0, 0.0), 0.0
        self._drafts: list[Draft] = []  # of this round, whose drafter says how sure it is
        self.waited, self.rest = False, Rest()

    def rows(self, requests: Sequence[Request], offers: Sequence[Offer], context: int) -> list[int]:
        """The rows of each request's next round, the anchor included; the round begins.

        Args:
            requests: who has it.
            offers: what they could have verified.
            context: tokens before it, of a request on average.
        """
        self._began, self._drafts, self.waited = self._clock(), [], False
        self._share_out(requests, offers, context)
        return self._share.rows

    def go_on(self, requests: int) -> None:
        """A round of rest begins that the last one has begun, of so many requests."""
        self.rest.go_on()  # of all, though each of them may have begun it alone
        self._drafts, self.waited = [], False
        self._share = _plain(requests)

    def part(self, rows: int, context: int) -> np.ndarray:
        """Seconds [rows] of the part of one request, were its first 1, 2, ... rows verified.

        A plain round and all drafts are everybody's alike, further rows are the request's own.
        """
        share, requests = self._share, len(self._share.rows)
        all_rows = sum(share.rows) - rows + np.arange(1, rows + 1)
        verify = self._costs.verify(all_rows, requests, context)
        part: np.ndarray = (share.plain + share.drafts) / requests + verify - verify[0]
        return part

    def cut(
        self,
        requests: Sequence[Request],
        offers: Sequence[Offer],
        drafts: Sequence[Draft],
        context: int,
    ) -> list[int]:
        """The rows again, once chains are drafted and their drafter has said how sure it is.

        Args:
            requests, context: as of `rows`.
            offers: what is drafted; of the chains that the round waits for, by what was said.
            drafts: those of which something was said.
        """
        self._drafts, self.waited = [*drafts], any(draft.waits for draft in drafts)
        if self.waited:
            self._share_out(requests, offers, context, self._share)
        return self._share.rows

    @property
    def is_trial(self) -> bool:
        """Whether this round is to find out what its width costs, so that nothing is cut."""
        return self._share.trial

    def _share_out(
        self,
        requests: Sequence[Request],
        offers: Sequence[Offer],
        context: int,
        before: Share | None = None,
    ) -> None:
        if before is None and not any(offer.chances for offer in offers):
            # Nobody has anything: no need to look for the best of it.
            count, plain = len(requests), 0.0
            if not self.rest.now:
                plain = float(self._costs.verify(np.array([count]), count, context)[0])
            self._share = _plain(count, plain)
            return
        standings = [self._standings.setdefault(request, Standing()) for request in requests]
        affordable, watch = self._account.affordable_together, self._watch(len(requests))
        begun = all(request.can_pipeline for request in requests)
        waits = any(offer.asked and offer.chances for offer in offers)  # drafts in every round
        ahead = self._costs.ahead if begun and not waits else 1.0
        of_all = standings, self._costs, context, affordable, watch
        self._share = share(offers, *of_all, before, ahead)

    def observe(self, brought: Sequence[tuple[Request, int]]) -> None:
        """Take in the tokens that the round brought each request, now that it is over."""
        played = self._share
        if not brought:
            return
        if played.seconds:
            seconds = self._clock() - self._began
            self._watch(len(played.rows)).saw(played.width, seconds, played.seconds)
            for cutting in {draft.cutting for draft in self._drafts}:
                cutting.took(seconds / played.seconds, self.waited)
        for request, tokens in brought:
            self._standings.setdefault(request, Standing()).book(played.cost, tokens)
        self._account.book(played.cost, sum(tokens for _, tokens in brought) / len(brought))
        if not self.rest.now:
            # One that finds out what plain rounds take has not looked in vain.
            found = played.width > 1 or played.trial
            self.rest.looked(found, fmean(request.doubt for request, _ in brought))

    def _watch(self, requests: int) -> Watch:
        return self._watches.setdefault(requests.bit_length(), Watch())


def _plain(requests: int, seconds: float = 0.0) -> Share:
    """A round of so many requests of which none drafts; no seconds: nobody looks at it."""
    return Share([1] * requests, 1.0, 1, seconds, seconds, 0.0)


def everything(offers: Sequence[Offer]) -> list[int]:
    """The rows where nothing is known about costs: all that there are."""
    return [1 + len(offer.chances) for offer in offers]


def _candidates(offers: Sequence[Offer]) -> tuple[np.ndarray, np.ndarray]:
    """The further rows that may be had, likeliest first: whose each is, and its chance."""
    each = [[] if offer.asked else offer.chances for offer in offers]
    of = np.repeat(np.arange(len(each)), [len(of_one) for of_one in each])
    chances = np.fromiter(chain.from_iterable(each), float, len(of))
    order = np.argsort(-chances, kind="stable")  # a request's rows stay in their order
    order = order[: np.count_nonzero(chances > 0)]
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
    expected, ahead = 1 + each.cumsum(axis=0), np.array([of_one.ahead for of_one in standings])
    bearable = np.minimum(np.maximum(0, ahead) + expected, ahead + 1 + SLACK).min(axis=1)
    return bearable / FLOOR
