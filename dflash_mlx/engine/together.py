"""Rounds of many requests: rows are shared out, drafted in one pass, verified in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from ..drafter.batch import propose_batch, propose_tree_batch
from ..loop import Batch, BatchItem
from ..policy.cuts import Draft, read_together
from ..policy.offer import Offer, Planting, checked
from ..proposal import Proposal
from ..targets import Target
from ..targets.batched import BatchVerifier
from .rows import SharedRounds, everything


class Flat(Batch):
    """The forwards of rounds whose requests' rows lie flat in one.

    Args:
        target: of all the requests.
        rounds: shares out rows by what they cost; None has every row verified that is offered.
    """

    def __init__(self, target: Target, rounds: SharedRounds | None) -> None:
        self._batch_verifier, self._rounds = BatchVerifier(target), rounds

    def propose(self, turns: Sequence[BatchItem]) -> None:
        """Set the proposals: of one request its own, of many what brings most for all."""
        if len(turns) == 1:
            with turns[0]:
                turns[0].proposal = turns[0].request.propose()
            return
        rest = self._rounds is not None and self._rounds.rest.begin()
        offers = self._offers(turns, rest)
        requests = [turn.request for turn, _ in offers]
        context = sum(each.target.position for each in requests) // max(1, len(requests))
        if self._rounds is None or not offers:
            rows = everything([offer for _, offer in offers])
        else:
            rows = self._rounds.rows(requests, [offer for _, offer in offers], context)
        offers = self._draft(offers, rows)
        if self._rounds is not None and offers and not self._rounds.is_trial:
            rows = self._cut(self._rounds, offers, context)
        for (turn, offer), count in zip(offers, rows, strict=True):
            with turn:
                if offer.draft is None:
                    turn.proposal = Proposal([turn.request.anchor])
                else:
                    turn.proposal = checked(offer.draft(count), count)

    def _offers(self, turns: Sequence[BatchItem], rest: bool) -> list[tuple[BatchItem, Offer]]:
        """What all of them could have verified; trees are drafted for it, in one pass."""
        offers, plantings = [], []
        for turn in turns:
            with turn:
                offer = turn.request.offer(rest)
                if isinstance(offer, Planting):
                    plantings.append((turn, offer))
                else:
                    offers.append((turn, offer))
        trees = propose_tree_batch(
            [of.session or turn.request.drafter for turn, of in plantings],
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

    def _draft(
        self, offers: Sequence[tuple[BatchItem, Offer]], rows: Sequence[int]
    ) -> list[tuple[BatchItem, Offer]]:
        """The offers, once chains of so many rows are drafted, in one pass."""
        chains = [at for at, count in enumerate(rows) if count > 1 and offers[at][1].draft is None]
        if not chains:
            return list(offers)
        drafted = [
            (turn, replace(offer, chances=[]) if offer.draft is None else offer)
            for turn, offer in offers
        ]
        turns = [offers[at][0] for at in chains]
        proposals = propose_batch(
            [offers[at][1].session or offers[at][0].request.drafter for at in chains],
            [turn.request.anchor for turn in turns],
            [rows[at] for at in chains],
            turns,
        )
        for at, turn, proposal in zip(chains, turns, proposals, strict=True):
            if proposal is not None:  # else its turn has the error
                with turn:
                    turn.proposal = checked(proposal, rows[at])
                    drafted[at] = turn, offers[at][1].as_drafted(proposal)
        return drafted

    def _cut(
        self, rounds: SharedRounds, offers: list[tuple[BatchItem, Offer]], context: int
    ) -> list[int]:
        """The rows again, now that drafters say how sure they are; waits once where that pays."""
        drafts: dict[int, Draft] = {}
        for at, (turn, offer) in enumerate(offers):
            if offer.look is not None and offer.draft is not None and turn.error is None:
                with turn:
                    part = rounds.part(len(turn.proposal), context)
                    drafts[at] = offer.look(turn.proposal, part)
        read_together([draft for draft in drafts.values() if draft.waits])
        for at, draft in drafts.items():
            if draft.waits:
                offers[at] = offers[at][0], replace(offers[at][1], chances=draft.chances())
        requests = [turn.request for turn, _ in offers]
        return rounds.cut(requests, [offer for _, offer in offers], [*drafts.values()], context)

    def verify(self, turns: Sequence[BatchItem]) -> Sequence[tuple[mx.array, mx.array]]:
        """One forward over the rows of all."""
        if len(turns) == 1:
            return [turns[0].request.target.verify(turns[0].proposal)]
        sessions = [turn.request.target for turn in turns]
        return self._batch_verifier.verify(sessions, [turn.proposal for turn in turns])

    def can_pipeline(self, turns: Sequence[BatchItem]) -> bool:
        """Whether nobody need be asked what he could draft in the next round."""
        if len(turns) == 1:
            return True
        if self._rounds is None:  # nobody says when those that rest are to look again
            return all(turn.request.stats.block_size == 1 for turn in turns)
        return self._rounds.rest.lasts

    def pipelined(self, turns: Sequence[BatchItem]) -> None:
        """Many of them rest together."""
        if self._rounds is not None and len(turns) > 1:
            self._rounds.go_on(len(turns))

    def observe(self, turns: Sequence[BatchItem]) -> None:
        """Take in what a shared round brought."""
        if self._rounds is not None and len(turns) > 1:
            events = [(turn.request, turn.event) for turn in turns if turn.event is not None]
            self._rounds.observe([(request, len(event.tokens)) for request, event in events])
