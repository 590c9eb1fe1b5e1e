"""What a request can draft in a round that it shares with others.

A chain's rows are worth what is believed of its slots, before it is drafted; a tree's are known
when it is, so it is drafted first, together with those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from ..drafter.calibration import Calibration
from ..drafter.tree import DraftTree
from ..proposal import Proposal


@dataclass(frozen=True)
class Offer:
    """Rows that a request could have verified beyond its anchor's.

    Attributes:
        chances: [n], never rising: how likely each row is kept, those before it counted in.
        draft: what makes the proposal of so many rows, the anchor included; None where it is the
            session's next chain, which can be drafted together with those of others.
        asked: all of these rows are to be verified, whatever they cost.
    """

    chances: Sequence[float]
    draft: Callable[[int], Proposal] | None = None
    asked: bool = False


@dataclass(frozen=True)
class Planting:
    """A tree that is to be drafted before it is known what it offers.

    Attributes:
        rows, width, calibration: as `TreeSession.propose_tree` takes them.
        grow: what the tree offers.
    """

    rows: int
    width: int
    calibration: Calibration
    grow: Callable[[DraftTree], Offer]


def paths(rates: Sequence[float]) -> list[float]:
    """How likely slots are kept, from how often each is right when those before it are."""
    return list(accumulate(rates, mul))
