"""How an engine's requests share a step: drafts in one pass, one verify forward for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..drafter.batch import BlockDraft, draft_batch
from ..events import Event
from ..memory import SPAN, compute
from ..policy.planner import DraftCandidate, TreeCandidate, checked
from ..proposal import Proposal
from ..request import Request, Step
from ..sampling import Decision, decide_all
from ..targets import Target, TargetSession
from ..targets.batched import BatchVerifier
from ..targets.session import PromptPiece
from .allocation import RowAllocator

UNREAD = Proposal([0])  # the only row of a plain step, whose token is still on the device


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
        self.error = self.error if error is None else error  # an error may be falsy
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

    @property
    def target_session(self) -> TargetSession:
        """The request's."""
        return self.request.caches.target_session


class SharedBatch:
    """Drafts and verifies many requests of one target together.

    Args:
        target: verifies all requests.
        allocator: decides how many rows each request has; None verifies all candidates.

    Attributes:
        slot_layers: the target's caches that are in slots in a shared step, by number.
    """

    def __init__(self, target: Target, allocator: RowAllocator | None) -> None:
        self._batch_verifier, self._allocator = BatchVerifier(target), allocator
        self.slot_layers = self._batch_verifier.slot_layers
        self._steps = 0

    def step(self, items: Sequence[BatchItem]) -> None:
        """Take the step of `loop.step` with many requests: one forward, and one wait.

        An error in one request's own part becomes its `item.error`, and the others go on. An error
        in a forward, or in what is computed for all, is raised here.

        Args:
            items: one new item per request; their events and errors are set.
        """
        items = sorted(items, key=_slot_order)
        for item in items:
            with item:
                item.request.begin_step(shared=len(items) > 1)
        new = [item for item in _without_errors(items) if item.request.started is None]
        if new:
            self.propose(new)
        for item in _without_errors(new):
            with item:
                item.target_session.check(item.proposal)
        if drafting := _without_errors(new):
            drafts = [item.proposal.tokens for item in drafting]
            compute([one for one in drafts if isinstance(one, mx.array)], wait=False)
            self._verify(drafting)
        running = _without_errors(items)
        steps = [item.request.take_step() for item in running]
        # Two forwards at most: of those whose step was pipelined, and of the new ones.
        forwards = {id(step.choices): step for step in steps}
        arrays = [(step.choices, step.taps) for step in forwards.values()]
        started: list[mx.array] = []
        ready = (one.request.can_start_next(of) for one, of in zip(running, steps, strict=True))
        if self._can_pipeline(items) and all(ready):
            compute(arrays, wait=False)
            started = self._start_next(running, steps)
        compute(arrays)
        compute(started, wait=False)
        read: dict[int, Any] = {at: step.choices.tolist() for at, step in forwards.items()}
        for item, step in zip(running, steps, strict=True):
            with item:
                if item.error is None:
                    own = slice(step.first, step.first + len(step.proposal))
                    kept = item.request.accept(step, read[id(step.choices)][own])
                    item.event = item.request.commit(step, *kept)
        self._steps += 1
        if self._steps % SPAN == 0:  # sessions without a slot do so themselves
            mx.clear_cache()
        if self._allocator is not None and len(new or items) > 1:
            events = [(item.request, item.event) for item in new or items if item.event is not None]
            pipelined = any(request.started is not None for request, _ in events)
            self._allocator.observe([len(event.tokens) for _, event in events], pipelined)

    def _start_next(self, items: Sequence[BatchItem], steps: Sequence[Step]) -> list[mx.array]:
        """Build a plain step of all, while the device computes these; what is to be computed.

        It must not start before these have ended: MLX writes to an array in place only if nothing
        that runs reads it, and would copy all keys and values.
        """
        for item, step in zip(items, steps, strict=True):
            with item:
                item.request.keep_anchor(step)
                item.proposal = UNREAD
        steps = [step for item, step in zip(items, steps, strict=True) if item.error is None]
        if not steps:
            return []
        tokens = steps[0].choices
        in_order = [step.choices is tokens and step.first == at for at, step in enumerate(steps)]
        if len(steps) != tokens.size or not all(in_order):
            rows = [step.choices[step.first : step.first + 1] for step in steps]
            tokens = mx.concatenate(rows)
        return self._verify(_without_errors(items), tokens)

    def _verify(self, items: Sequence[BatchItem], tokens: mx.array | None = None) -> list[mx.array]:
        """Start the requests' steps, in one forward; returns its arrays. Lazy.

        `tokens` [R] are those of pipelined steps, whose proposals are `UNREAD`.
        """
        logits, taps = self.verify(items, tokens)
        pipelined, first = tokens is not None, 0
        of = [Decision(one.request.sampler, one.proposal, int(pipelined), one) for one in items]
        choices = decide_all(of, logits)
        for item in items:
            item.request.started = Step(item.proposal, choices, taps, first, pipelined)
            first += len(item.proposal)
            if pipelined:
                item.target_session.commit([0])
        return [choices, taps]

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
            rows = self._allocator.allocate(candidates)
        chains = []
        for item, candidate, count in zip(items, candidates, rows, strict=True):
            with item:
                if count == 1:
                    item.proposal = Proposal([item.request.anchor])
                elif candidate.propose is None:
                    of = item.request.caches.draft_session, item.request.anchor
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

    def verify(
        self, items: Sequence[BatchItem], tokens: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """One forward: the logits [R, V] after all proposals' rows, and their taps [1, R, K*D]."""
        if len(items) == 1:
            proposal = items[0].proposal if tokens is None else Proposal(tokens)
            return items[0].target_session.verify(proposal)
        sessions = [item.target_session for item in items]
        return self._batch_verifier.verify(sessions, [item.proposal for item in items], tokens)

    def read(self, ends: Sequence[PromptPiece]) -> list[Any]:
        """Read the ends of prompts in one forward, for `Request.read`; [] if that is impossible."""
        if len(ends) < 2 or not self._batch_verifier.reads_prompts:
            return []
        return self._batch_verifier.read(ends)

    def _can_pipeline(self, items: Sequence[BatchItem]) -> bool:
        """Whether the next step of these may start before this one is read."""
        if len(items) == 1:
            return True
        if self._allocator is None:
            return all(item.request.stats.block_size == 1 for item in items)
        return self._allocator.can_pipeline


def _slot_order(item: BatchItem) -> tuple[int, int]:
    """What sorts requests by their slots; those without one come first."""
    slot = item.target_session.slot
    return (0, 0) if slot is None else (slot.array.capacity, slot.index)


def _without_errors(items: Sequence[BatchItem]) -> list[BatchItem]:
    return [item for item in items if item.error is None]
