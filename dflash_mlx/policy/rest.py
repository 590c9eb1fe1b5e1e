"""Rounds that are plain without a look, where looks have found nothing worth drafting.

A look has a price of its own: how sure the target was is computed, read and weighed. That is little
beside a round of a large model, and some 4% of a small one's. Whoever has looked in vain twice
need not look every time, as long as the target does not become surer: the way back to drafting is
found a few tokens later at most.
"""

from __future__ import annotations

from .beliefs import Certainty
from .outcome import Outcome

WELL = 4  # drafted tokens that were right, after which the next round asks for no certainty
PATIENCE = 2  # looks in vain that double the time to the next one,
LONGEST = 7  # and the most rounds of rest until then
EASING = 0.9  # of the doubt at the look before, or less, is left: soon drafts may be worth it again


class Rest:
    """When one request, or many together, need not look.

    Attributes:
        now: whether this round is one of rest.
    """

    def __init__(self) -> None:
        self.now = False
        self._in_vain = self._left = 0
        self._doubt = 1.0

    @property
    def lasts(self) -> bool:
        """Whether the next round is one of rest, whatever this one brings."""
        return self._left > 0

    def begin(self) -> bool:
        """A round begins; `now` is what is returned."""
        self.now = self._left > 0
        self._left -= self.now
        return self.now

    def looked(self, drafts: bool, doubt: float) -> None:
        """A look had this round draft something, or not; `Certainty.doubt` is so much after it."""
        self._in_vain = 0 if drafts else self._in_vain + 1
        eases, self._doubt = doubt < EASING * self._doubt, doubt
        self._left = 0 if eases else min(LONGEST, 2 ** (self._in_vain // PATIENCE) - 1)


class Looking:
    """Rounds of one request that ask how sure the target was lately, and rest from it.

    Attributes:
        plain_next: whether this round is plain, and the next one, too, whatever this one brings.
    """

    def __init__(self) -> None:
        self._certainty, self._rest = Certainty(), Rest()
        self._goes_well = self.plain_next = False
        # Tokens, beyond one, whose features this round's draft reads first. That says nothing of
        # its width: what is read now need not be read again.
        self._reads = 0

    def _rests_on(self, shared: bool) -> bool:
        """A round of rest begins, unasked; whether the next one is one, too."""
        lasts = shared or (self._rest.begin() and self._rest.lasts)
        self._rest.now = True
        return lasts

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
        if not (self._rest.now or outcome.shared):
            self._rest.looked(len(outcome.proposal) > 1, self.doubt)
