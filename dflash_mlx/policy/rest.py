"""Rounds that are plain without a look, where looks have found nothing worth drafting.

A look has a price of its own: how sure the target was is computed, read and weighed. That is little
beside a round of a large model, and some 4% of a small one's. Whoever has looked in vain twice
need not look every time, as long as the target does not become surer: the way back to drafting is
found a few tokens later at most.
"""

from __future__ import annotations

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
