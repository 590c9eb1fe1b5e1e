"""How a round went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..proposal import Proposal


class Outcome(NamedTuple):
    """How a round went.

    Attributes:
        accepted: how many drafted nodes the target kept.
        tokens: what the text went on by.
        certainty: probability of the target's favourite where it chose the last of them; None
            where nobody asked for it.
        seconds: that the round took.
        shared: whether it was a round of other requests as well, to which they belong.
        ahead: how many of this round and the next one were begun before the one before was read. Of
            one alone the seconds are not a round's: they hold two forwards, or a part of one.
    """

    proposal: Proposal
    accepted: int
    tokens: Sequence[int]
    certainty: float | None
    seconds: float
    shared: bool = False
    ahead: int = 0

    def without(self, part: float) -> Outcome:
        """The same round, had it taken that part of its time less."""
        return self._replace(seconds=(1 - part) * self.seconds)
