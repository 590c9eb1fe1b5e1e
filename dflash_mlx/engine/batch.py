"""How an engine's requests share a step: drafts in one pass, one verify forward for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..drafter.batch import BlockDraft, draft_batch
from ..events import Event
from ..policy.planner import DraftCandidate, TreeCandidate, checked
from ..proposal import Proposal
from ..request import Request
from ..targets import Target
from ..targets.batched import BatchVerifier
from .allocation import RowAllocator


class ErrorCapture:
    """A context that captures an exception, so that one request's error does not end the batch.

    Attributes:
        error: the last exception raised inside, a BaseException too; None for none.
    """

    error: BaseException | None = None

    def __enter__(self) -> ErrorCapture:
        """The capture itself, whose `error` is known afterwards."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep an exception."""
        self.error = error or self.error
        return error is not None


class BatchItem(ErrorCapture):
    """One request's part in a step. `with item:` captures the errors of this request alone.

    Attributes:
        request: the request.
        candidate: the rows that could be verified.
        proposal: the rows that the target verifies for it.
        event: the result; None if there is an error instead.
    """

    candidate: DraftCandidate | TreeCandidate
    proposal: Proposal
    event: Event | None = None

    def __init__(self, request: Request) -> None:
        self.request = request


class SharedBatch:
    """Drafts and verifies many requests of one target together.

    Args:
        target: verifies all requests.
        allocator: decides how many rows each request has; None verifies all candidates.
    """

    def __init__(self, target: Target, allocator: RowAllocator | None) -> None:
        self._batch_verifier, self._allocator = BatchVerifier(target), allocator

    def step(self, items: Sequence[BatchItem]) -> None:
        """Take the step of `loop.step` with many requests: one forward, and one wait.

        An error in one request's own part becomes its `item.error`, and the others go on. An error
        in a forward is raised here: then no cache of these requests can be trusted.

        Args:
            items: one new item per request; their events and errors are set.
        """
        new = []  # requests whose verify forward the last step did not start
        for item in items:
            with item:
                if not item.request.begin_step(shared=len(items) > 1):
                    new.append(item)
        if new:
            self.propose(new)
            self._verify(new)
        running = _without_errors(items)
        if running:
            chosen, taps = zip(*[item.request.pending for item in running], strict=True)
            choices = mx.concatenate(list(chosen))
            can_start = all(item.request.can_start_next for item in running)
            pipelined = can_start and self._can_pipeline(items)
            if pipelined:
                self._build_next(running)
            mx.eval(choices, *taps)
            if pipelined:
                mx.async_eval([item.request.pending for item in _without_errors(running)])
            values: Any = choices.tolist()
            for item, own in zip(running, chosen, strict=True):
                with item:
                    if item.error is None:
                        kept = item.request.accept(values[: own.size])
                        item.event = item.request.commit(*kept)
                values = values[own.size :]
        if self._allocator is not None and len(new or items) > 1:
            events = [(item.request, item.event) for item in new or items if item.event is not None]
            pipelined = any(request.is_pipelined for request, _ in events)
            tokens = [(request, len(event.tokens)) for request, event in events]
            self._allocator.observe(tokens, pipelined)

    def _build_next(self, items: Sequence[BatchItem]) -> None:
        """Build a plain step of all, while the device computes this one.

        It must not start before this one has ended: MLX writes to an array in place only if nothing
        that runs reads it, and would copy all keys and values.
        """
        mx.async_eval([item.request.pending for item in items])
        for item in items:
            with item:
                item.proposal = item.request.next_anchor()
        self._verify(items)

    def _verify(self, items: Sequence[BatchItem]) -> None:
        """Verify the proposals, and choose the token after each row. Lazy."""
        items = _without_errors(items)
        if not items:
            return
        drafts = [t for item in items if isinstance(t := item.proposal.tokens, mx.array)]
        mx.async_eval(drafts)
        for item, (logits, taps) in zip(items, self.verify(items), strict=True):
            with item:
                item.request.choose(item.proposal, logits, taps)

    def propose(self, items: Sequence[BatchItem]) -> None:
        """Set the proposals: one request's own, or those that bring many the most tokens."""
        if len(items) == 1:
            with items[0]:
                items[0].proposal = items[0].request.propose()
            return
        self._set_candidates(items)
        items = _without_errors(items)
        candidates: list[Any] = [item.candidate for item in items]
        rows = [1 + len(candidate.path_probs) for candidate in candidates]
        if self._allocator is not None and items:
            rows = self._allocator.allocate([item.request for item in items], candidates)
        chains = []
        for item, candidate, count in zip(items, candidates, rows, strict=True):
            with item:
                if count == 1:
                    item.proposal = Proposal([item.request.anchor])
                elif candidate.propose is None:
                    of = item.request.draft_session, item.request.anchor
                    chains.append((item, BlockDraft(*of, count, None, item)))
                else:
                    item.proposal = checked(candidate.propose(count), count)
        drafts = draft_batch([draft for _, draft in chains])
        for (item, draft), proposal in zip(chains, drafts, strict=True):
            if item.error is None:
                with item:
                    item.proposal = checked(proposal, draft.width)

    def _set_candidates(self, items: Sequence[BatchItem]) -> None:
        """Set the rows that each request could have verified. Trees are drafted, in one pass."""
        trees: list[tuple[BatchItem, TreeCandidate]] = []
        for item in items:
            with item:
                item.candidate = item.request.candidate()
                if isinstance(item.candidate, TreeCandidate):
                    trees.append((item, item.candidate))
        drafts = draft_batch(
            [
                BlockDraft(of.session, item.request.anchor, of.width, of.rows, item)
                for item, of in trees
            ]
        )
        for (item, of), tree in zip(trees, drafts, strict=True):
            if item.error is None:
                with item:
                    item.candidate = of.ready(tree)

    def verify(self, items: Sequence[BatchItem]) -> Sequence[tuple[mx.array, mx.array]]:
        """One forward: logits [N, V] after a proposal's rows, its taps [1, N, K*D], per item."""
        if len(items) == 1:
            return [items[0].request.target_session.verify(items[0].proposal)]
        sessions = [item.request.target_session for item in items]
        return self._batch_verifier.verify(sessions, [item.proposal for item in items])

    def _can_pipeline(self, items: Sequence[BatchItem]) -> bool:
        """Whether the next step of these may start before this one is read."""
        if len(items) == 1:
            return True
        if self._allocator is None:
            return all(item.request.stats.block_size == 1 for item in items)
        return self._allocator.can_pipeline


def _without_errors(items: Sequence[BatchItem]) -> list[BatchItem]:
    return [item for item in items if item.error is None]
