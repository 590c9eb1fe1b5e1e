"""What a request can draft in a round that it shares with others.

A chain's rows are worth what is believed of its slots, before it is drafted, and what its drafter
says of them afterwards, if it says. A tree's are known when it is drafted, so that comes first,
together with those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from ..drafter.calibration import Calibration
from ..drafter.protocol import DraftSession
from ..drafter.tree import DraftTree
from ..errors import ProposalError
from ..proposal import Proposal

if TYPE_CHECKING:
    from .cuts import Draft


@dataclass(frozen=True)
class Offer:
    """Rows that a request could have verified beyond its anchor's.

    Attributes:
        chances: [n], never rising: how likely each row is kept, those before it counted in.
        draft: what makes the proposal of so many rows, the anchor included; None where it is a
            session's next chain, which can be drafted together with those of others.
        asked: all of these rows are to be verified, whatever they cost.
        unread: tokens whose features such a draft reads first, beyond those of one.
        session: whose chain it is; None for the request's own session.
        look: what its drafter says of that chain, given the seconds [w] of the request's part of
            the round, were its first 1, 2, ... rows verified; None where it says nothing.
    """

    chances: Sequence[float]
    draft: Callable[[int], Proposal] | None = None
    asked: bool = False
    unread: int = 0
    session: DraftSession | None = None
    look: Callable[[Proposal, np.ndarray], Draft] | None = None

    def as_drafted(self, proposal: Proposal) -> Offer:
        """The same once its chain is drafted, whose first rows cost nothing more."""
        chances = self.chances[: len(proposal) - 1]
        return replace(self, chances=chances, draft=proposal.first)


@dataclass(frozen=True)
class Planting:
    """A tree that is to be drafted before it is known what it offers.

    Attributes:
        rows, width, calibration: as `TreeSession.propose_tree` takes them.
        grow: what the tree offers.
        session: whose tree it is; None for the request's own session.
    """

    rows: int
    width: int
    calibration: Calibration
    grow: Callable[[DraftTree], Offer]
    session: DraftSession | None = None


def offer_chain(session: DraftSession, anchor: int, limit: int, chances: Sequence[float]) -> Offer:
    """The chain of which more is expected, drafted or foreseen: the latter has a `draft`.

    Args:
        session: a request's.
        anchor: where its chain begins.
        limit: the most rows.
        chances: of a drafted chain's rows.
    """
    unread = max(0, session.unread - 1)
    foreseen = paths(session.lookup_rates(anchor, limit))
    if session.network is None or sum(foreseen) > sum(chances):
        return Offer(foreseen, partial(session.propose_lookup, anchor))
    return Offer(chances, unread=unread, session=session.network)


def paths(rates: Sequence[float]) -> list[float]:
    """How likely slots are kept, from how often each is right when those before it are."""
    return list(accumulate(rates, mul))


def chain(session: DraftSession, anchor: int, width: int) -> Proposal:
    """A session's proposal of at most `width` rows. Raises `ProposalError` when it has more."""
    return checked(session.propose(anchor, width), width)


def checked(proposal: Proposal, rows: int) -> Proposal:
    """A proposal of at most so many rows. Raises `ProposalError` when it has more."""
    if len(proposal) > rows:
        raise ProposalError(f"A proposal has {len(proposal)} rows, at most {rows} were asked.")
    return proposal
