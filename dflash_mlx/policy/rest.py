"""Rounds that are plain without a look, where looks have found nothing worth drafting.

A look has a price of its own: how sure the target was is computed, read and weighed, and where a
draft may follow, the device waits for the host meanwhile. Whoever has looked in vain twice need not
look every time, as long as the target does not become surer: the way back to drafting is found a
few tokens later at most.

Rounds of rest are begun ahead, and so is the one that ends a rest: it only says how sure the target
was. While that is weighed, the device is at the next round already, so nothing waits for a look
that is in vain; where drafting pays again, it begins a token later.
"""

from __future__ import annotations

from collections.abc import Callable

from .beliefs import Certainty
from .outcome import Outcome

WELL = 4  # drafted tokens that were right, after which the next round asks for no certainty
PATIENCE = 2  # looks in vain that double the time to the next one,
LONGEST = 7  # and the most rounds of rest until then; of those begun ahead the last one looks
EASING = 0.9  # of the doubt at the look before, or less, is left: soon drafts may be worth it again


class Rest:
    """When one request, or many together, need not look.

    Attributes:
        now: whether this round is one of rest.
    """

    def __init__(self) -> None:
        self.now = False
        self._in_vain = self._left = 0
        self._looks = False  # whether this round is to say how sure the target was
        self._doubt = 1.0

    @property
    def lasts(self) -> bool:
        """Whether the next round is one of rest, whatever this one brings."""
        return self._left > 0

    @property
    def may_last(self) -> bool:
        """Whether it is one if this round, where it looks and is plain, has looked in vain."""
        return self.lasts or (self._looks and _length(self._in_vain + 1) > 0)

    @property
    def looks_next(self) -> bool:
        """Whether the next round has to look, if it is begun ahead.

        The last one of a rest does; and so does the one behind a look, for the target may be
        becoming surer.
        """
        return self._left == 1 or (self._left == 0 and self._looks)

    def begin(self) -> bool:
        """A round begins; `now` is what is returned."""
        self.now = self._left > 0
        self._left -= self.now
        self._looks = not self.now
        return self.now

    def go_on(self, looks: bool = False) -> None:
        """A round of rest begins that the device is at already; whether it looks."""
        self.now, self._looks = True, looks
        self._left = max(0, self._left - 1)

    def end(self) -> None:
        """A look that was begun ahead has found a draft that pays, after the round at hand."""
        self._left, self.now, self._looks = 0, True, False

    def looked(self, drafts: bool, doubt: float) -> None:
        """A look had this round draft something, or not; `Certainty.doubt` is so much after it."""
        self._in_vain = 0 if drafts else self._in_vain + 1
        eases, self._doubt = doubt < EASING * self._doubt, doubt
        self._left = 0 if eases else _length(self._in_vain)


def _length(in_vain: int) -> int:
    """Rounds of rest after so many looks in vain."""
    return min(LONGEST, 2 ** (in_vain // PATIENCE) - 1)


class Looking:
    """Rounds of one request that ask how sure the target was lately, and rest from it.

    Attributes:
        plain_next: whether this round is plain, and the next one, too, before this one is read.
        looks_next: whether the next one, if it is begun ahead, asks how certain the target was.
    """

    def __init__(self) -> None:
        self._certainty, self._rest = Certainty(), Rest()
        self._goes_well = self.plain_next = self.looks_next = False
        self._looked_ahead = False  # the round before this one did, and was begun ahead
        # Tokens, beyond one, whose features this round's draft reads first. That says nothing of
        # its width: what is read now need not be read again.
        self._reads = 0

    def _begin_chain(self, choose: Callable[[], int]) -> int:
        """The width of a round that was not begun ahead: 1 of one of rest, else as it is chosen."""
        width = 1 if self._rest.begin() else choose()
        self.plain_next = width == 1 and self._rest.may_last
        self.looks_next = self._rest.looks_next
        return width

    def _rests_on(self, shared: bool, pays: Callable[[], bool]) -> None:
        """A round of rest begins that the device is at already.

        If the one before has looked, it is asked whether a draft pays: then one follows this round.
        """
        if shared:  # they rest together
            self._rest.now, self.plain_next, self.looks_next = True, True, False
            return
        if self._looked_ahead and pays():
            self._rest.end()  # what comes of it is for the round that drafts to say
        else:
            if self._looked_ahead:
                self._rest.looked(False, self.doubt)
            self._rest.go_on(self.looks_next)
        self.plain_next, self.looks_next = self._rest.may_last, self._rest.looks_next

    def _seconds(self, outcome: Outcome, ahead: float) -> float | None:
        """What a round took, or would have on its own; None where that is not known, or not asked.

        `ahead` is what a plain round that is begun ahead takes, over one on its own.
        """
        looked = not self._rest.now or self._looked_ahead
        if not looked or outcome.ahead == 1:
            return None
        return outcome.seconds / ahead if outcome.ahead else outcome.seconds

    def _without_reading(
        self, outcome: Outcome, rows: int, part: Callable[[int, int], float]
    ) -> Outcome:
        """A round of so many drafted rows, had no features been read first.

        `part` is the part of it that reading those of so many tokens is; see `Widths.reading`.
        """
        reads, self._reads = self._reads, 0
        return outcome.without(part(rows, reads)) if reads > 0 else outcome

    @property
    def asks_certainty(self) -> bool:
        """It is what a look is for; drafts that are right have said it already."""
        return not (self._rest.now or self._goes_well)

    @property
    def doubt(self) -> float:
        """How unsure the target was of the last few tokens."""
        return self._certainty.doubt

    def begin(self, certainty: float | None) -> None:
        """Where the first draft begins to be believed in."""
        self._certainty.take(1, certainty)

    def _take(self, outcome: Outcome) -> None:
        """Take in how sure the target was; requests that share a round rest together."""
        self._certainty.take(len(outcome.tokens), outcome.certainty)
        self._goes_well = outcome.accepted >= WELL
        self._looked_ahead = self._rest.now and outcome.certainty is not None
        if not (self._rest.now or outcome.shared):
            self._rest.looked(len(outcome.proposal) > 1, self.doubt)
