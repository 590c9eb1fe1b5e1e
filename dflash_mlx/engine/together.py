"""Rounds of many requests: rows are shared out, drafted in one pass, verified in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from ..drafter.forest import propose_together, propose_trees_together
from ..drafter.protocol import TreeSession
from ..loop import Turn
from ..policy.offer import Offer, Planting
from ..policy.rounds import checked
from ..proposal import Proposal
from ..target import Target
from ..target.forest import Forest
from .rows import SharedRounds, everything


class Flat:
    """The forwards of rounds whose requests' rows lie flat in one.

    Args:
        target: of all the requests.
        rounds: shares out rows by what they cost; None has every row verified that is offered.
    """

    def __init__(self, target: Target, rounds: SharedRounds | None) -> None:
        self._forest, self._rounds = Forest(target), rounds

    def propose(self, turns: Sequence[Turn]) -> None:
        """Set the proposals: of one request its own, of many what brings most for all."""
        if len(turns) == 1:
            with turns[0]:
                turns[0].proposal = turns[0].request.propose()
            return
        offers = self._offers(turns)
        rows = self._rows(offers)
        chains = []
        for (turn, offer), count in zip(offers, rows, strict=True):
            with turn:
                if offer.draft is None and count > 1:
                    chains.append((turn, offer, count))
                elif offer.draft is None:
                    turn.proposal = Proposal([turn.request.anchor])
                else:
                    turn.proposal = checked(offer.draft(count), count)
        self._draft(chains)

    def _offers(self, turns: Sequence[Turn]) -> list[tuple[Turn, Offer]]:
        """What all of them could have verified; trees are drafted for it, in one pass."""
        offers, plantings = [], []
        for turn in turns:
            with turn:
                offer = turn.request.offer()
                if isinstance(offer, Planting):
                    plantings.append((turn, offer))
                else:
                    offers.append((turn, offer))
        trees = propose_trees_together(
            [cast(TreeSession, of.session or turn.request.drafter) for turn, of in plantings],
            [turn.request.anchor for turn, _ in plantings],
            [planting.rows for _, planting in plantings],
            [planting.width for _, planting in plantings],
            [planting.calibration for _, planting in plantings],
            guards=[turn for turn, _ in plantings],
        )
        for (turn, planting), tree in zip(plantings, trees, strict=True):
            if tree is not None:  # else its turn has the error
                with turn:
                    offers.append((turn, planting.grow(tree)))
        return offers

    def _rows(self, offers: Sequence[tuple[Turn, Offer]]) -> list[int]:
        if self._rounds is None or not offers:
            return everything([offer for _, offer in offers])
        requests = [turn.request for turn, _ in offers]
        context = sum(request.target.position for request in requests) // len(requests)
        return self._rounds.rows(requests, [offer for _, offer in offers], context)

    def _draft(self, chains: Sequence[tuple[Turn, Offer, int]]) -> None:
        """Draft chains of so many rows in one pass."""
        if not chains:
            return
        sessions = [offer.session or turn.request.drafter for turn, offer, _ in chains]
        anchors = [turn.request.anchor for turn, _, _ in chains]
        counts, guards = [count for _, _, count in chains], [turn for turn, _, _ in chains]
        proposals = propose_together(sessions, anchors, counts, guards)
        for (turn, offer, count), proposal in zip(chains, proposals, strict=True):
            if proposal is not None:
                with turn:
                    turn.proposal = checked(proposal, count)
                    if offer.drafted is not None:
                        offer.drafted(proposal)

    def verify(self, turns: Sequence[Turn]) -> Sequence[tuple[mx.array, mx.array]]:
        """One forward over the rows of all."""
        if len(turns) == 1:
            return [turns[0].request.target.verify(turns[0].proposal)]
        sessions = [turn.request.target for turn in turns]
        return self._forest.verify(sessions, [turn.proposal for turn in turns])

    def observe(self, turns: Sequence[Turn]) -> None:
        """Take in what a shared round brought."""
        if self._rounds is not None and len(turns) > 1:
            events = [(turn.request, turn.event) for turn in turns if turn.event is not None]
            self._rounds.observe([(request, len(event.tokens)) for request, event in events])
