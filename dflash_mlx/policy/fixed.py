"""In a policy's place: chains, every one as wide as allowed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from ..drafter.protocol import Abilities, Both, Session
from ..proposal import Proposal
from ..sharpness import Sharpness
from .offer import Offer, chain, network_of, offer_chain, paths
from .outcome import Outcome


@dataclass(frozen=True)
class FixedWidth:
    """In a policy's place: every round as wide as allowed.

    Attributes:
        ranking: how drafts are ranked at any temperature; None learns it anew in each request.
    """

    ranking: Sharpness | None = None

    def sharpness(self, temperature: float) -> Sharpness:
        """What drafts are ranked by: as given, or to be learnt."""
        return self.ranking or Sharpness()


class FixedRounds:
    """Chains, every one as wide as allowed."""

    asks_certainty, doubt = False, 0.0

    def __init__(self, sharpness: Sharpness) -> None:
        self.sharpness, self._can = sharpness, Abilities()
        self.plain_next = self.looks_next = False

    def begin(self, certainty: float | None) -> None:
        """Nothing depends on it."""
        pass

    def propose(self, session: Session, anchor: int, context: int, limit: int) -> Proposal:
        """The session's own draft, as wide as allowed."""
        self.plain_next = limit == 1  # of the block size; the text's last round has no next
        return chain(session, anchor, limit)

    def go_on(self, session: Session, anchor: int, context: int, limit: int, shared: bool) -> None:
        """So will the next one be."""
        pass

    def offer(
        self, session: Session, anchor: int, context: int, limit: int, rest: bool = False
    ) -> Offer:
        """All rows, asked for whatever they cost."""
        self.plain_next = limit == 1
        if network_of(session, self._can) is None:
            return Offer([1.0] * (limit - 1), asked=True)
        chances = paths([cast(Both, session).rate] * (limit - 1))
        return replace(offer_chain(session, self._can, anchor, limit, chances), asked=True)

    def observe(self, outcome: Outcome) -> None:
        """Nothing is learnt."""
        pass
