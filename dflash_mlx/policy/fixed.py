"""In a policy's place: chains, every one as wide as allowed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..drafter.protocol import DraftSession
from ..proposal import Proposal
from ..sharpness import Sharpness
from .offer import Offer, chain, offer_chain, paths
from .outcome import Outcome

RATE = 0.85  # of a network's slots, against a lookup's


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
        self.sharpness = sharpness
        self.plain_next = self.looks_next = False

    def begin(self, certainty: float | None) -> None:
        """Nothing depends on it."""
        pass

    def propose(self, session: DraftSession, anchor: int, context: int, limit: int) -> Proposal:
        """The session's own draft, as wide as allowed."""
        self.plain_next = limit == 1  # of the block size; the text's last round has no next
        return chain(session, anchor, limit)

    def go_on(
        self, session: DraftSession, anchor: int, context: int, limit: int, shared: bool
    ) -> None:
        """So will the next one be."""
        pass

    def offer(
        self, session: DraftSession, anchor: int, context: int, limit: int, rest: bool = False
    ) -> Offer:
        """All rows, asked for whatever they cost."""
        self.plain_next = limit == 1
        offer = offer_chain(session, anchor, limit, paths([RATE] * (limit - 1)))
        if offer.draft is None:
            offer = replace(offer, chances=[1.0] * (limit - 1))
        return replace(offer, asked=True)

    def observe(self, outcome: Outcome) -> None:
        """Nothing is learnt."""
        pass
