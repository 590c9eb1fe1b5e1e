"""How an engine's requests share a step: drafts in one pass, one verify forward for all."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..drafter.batch import propose_batch, propose_tree_batch
from ..loop import Batch, BatchItem
from ..policy.planner import Candidate, TreeCandidate, checked
from ..proposal import Proposal
from ..targets import Target
from ..targets.batched import BatchVerifier
from .allocation import RowAllocator


class SharedBatch(Batch):
    """Drafts and verifies many requests of one target together.

    Args:
        target: verifies all requests.
        allocator: decides how many rows each request has; None verifies all candidates.
    """

    def __init__(self, target: Target, allocator: RowAllocator | None) -> None:
        self._batch_verifier, self._allocator = BatchVerifier(target), allocator

    def propose(self, items: Sequence[BatchItem]) -> None:
        """Set the proposals: one request's own, or those that bring many the most tokens."""
        if len(items) == 1:
            with items[0]:
                items[0].proposal = items[0].request.propose()
            return
        candidates = self._candidates(items)
        requests = [item.request for item, _ in candidates]
        each = [candidate for _, candidate in candidates]
        if self._allocator is None or not each:
            rows = [1 + len(candidate.paths) for candidate in each]
        else:
            rows = self._allocator.allocate(requests, each)
        chains: list[tuple[BatchItem, int]] = []
        for (item, candidate), count in zip(candidates, rows, strict=True):
            with item:
                if count == 1:
                    item.proposal = Proposal([item.request.anchor])
                elif candidate.propose is None:
                    chains.append((item, count))
                else:
                    item.proposal = checked(candidate.propose(count), count)
        _draft_chains(chains)

    def _candidates(self, items: Sequence[BatchItem]) -> list[tuple[BatchItem, Candidate]]:
        """The rows that each request could have verified. Trees are drafted first, in one pass."""
        candidates: list[tuple[BatchItem, Candidate]] = []
        trees: list[tuple[BatchItem, TreeCandidate]] = []
        for item in items:
            with item:
                candidate = item.request.candidate()
                if isinstance(candidate, TreeCandidate):
                    trees.append((item, candidate))
                else:
                    candidates.append((item, candidate))
        drafted = propose_tree_batch(
            [candidate.session for _, candidate in trees],
            [item.request.anchor for item, _ in trees],
            [candidate.rows for _, candidate in trees],
            [candidate.length for _, candidate in trees],
            guards=[item for item, _ in trees],
        )
        for (item, of_tree), tree in zip(trees, drafted, strict=True):
            if tree is not None:  # else the item has the error
                with item:
                    candidates.append((item, of_tree.ready(tree)))
        return candidates

    def verify(self, items: Sequence[BatchItem]) -> Sequence[tuple[mx.array, mx.array]]:
        """One forward over the rows of all requests."""
        if len(items) == 1:
            return [items[0].request.target_session.verify(items[0].proposal)]
        sessions = [item.request.target_session for item in items]
        return self._batch_verifier.verify(sessions, [item.proposal for item in items])

    def can_pipeline(self, items: Sequence[BatchItem]) -> bool:
        """Whether more plain steps are decided for all of them."""
        if len(items) == 1:
            return True
        if self._allocator is None:
            return all(item.request.stats.block_size == 1 for item in items)
        return self._allocator.can_pipeline

    def observe(self, items: Sequence[BatchItem]) -> None:
        """Learn from a shared step."""
        if self._allocator is not None and len(items) > 1:
            events = [(item.request, item.event) for item in items if item.event is not None]
            pipelined = any(request.is_pipelined for request, _ in events)
            tokens = [(request, len(event.tokens)) for request, event in events]
            self._allocator.observe(tokens, pipelined)


def _draft_chains(chains: Sequence[tuple[BatchItem, int]]) -> None:
    """Set the proposals of requests whose network drafts a chain of so many rows."""
    items = [item for item, _ in chains]
    proposals = propose_batch(
        [item.request.draft_session.network or item.request.draft_session for item in items],
        [item.request.anchor for item in items],
        [rows for _, rows in chains],
        items,
    )
    for (item, rows), proposal in zip(chains, proposals, strict=True):
        if proposal is not None:  # else the item has the error
            with item:
                item.proposal = checked(proposal, rows)
