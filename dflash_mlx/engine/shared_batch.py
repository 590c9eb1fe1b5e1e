"""Steps that the requests of an engine share: one draft pass and one verification for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..drafter.batched_drafts import BlockDraft, draft_batch
from ..events import Event
from ..memory import SPAN, compute
from ..policy.planner import DraftCandidate, TreeCandidate, checked
from ..proposal import Proposal
from ..request import Request, Step
from ..sampling import sample
from ..targets import Target, TargetSession
from ..targets.kv_slots import KVSlots
from ..targets.rows import Rows
from ..targets.span import Span
from .allocation import RowAllocator

# Stands for the only row of a plain step while its token is still on the device.
PLACEHOLDER = Proposal([0])


class ErrorCapture:
    """A context that captures an exception, so that one request's error does not end the batch.

    Attributes:
        error: the last exception raised inside, a BaseException of any class; None for none.
    """

    error: BaseException | None = None

    def __enter__(self) -> ErrorCapture:
        """Return the capture itself; its `error` is set when the context ends."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep the exception and suppress it."""
        self.error = self.error if error is None else error  # an error may be falsy
        return error is not None


class BatchItem(ErrorCapture):
    """One request's part in a step. `with item:` captures the errors of this request alone.

    Attributes:
        request: the request.
        candidate: the rows that the request offers to verify.
        proposal: the rows that the target verifies for it.
        span: these rows in the forward.
        step: the verified rows; None before they are verified.
        event: the result of the step; None if the request failed.
    """

    candidate: DraftCandidate | TreeCandidate
    proposal: Proposal
    span: Span
    step: Step | None = None
    event: Event | None = None

    def __init__(self, request: Request) -> None:
        self.request = request

    @property
    def target_session(self) -> TargetSession:
        """The target's session of this request."""
        return self.request.caches.target_session


class SharedBatch:
    """Drafts and verifies many requests of one target together.

    Args:
        target: verifies all requests.
        allocator: decides how many rows each request has; None verifies all candidates.

    Attributes:
        slot_layers: the numbers of the target's caches that are in slots in shared steps.
    """

    def __init__(self, target: Target, allocator: RowAllocator | None) -> None:
        self._target = target
        self._allocator = allocator
        self.slot_layers = () if target.sharing is None else target.sharing.slot_layers
        self._slots = KVSlots(self.slot_layers)
        self._steps = 0
        self._ahead: dict[Request, Step] = {}  # plain steps that have started; see `loop.decode`

    def step(self, items: Sequence[BatchItem]) -> None:
        """Take a step of `loop.decode` with many requests: one forward, and one wait.

        An error in one request's own part becomes its `item.error`, and the others go on. An error
        in a forward, or in what is computed for all, is raised here.

        Args:
            items: one new item per request; their events and errors are set.
        """
        items = sorted(items, key=_slot_order)
        for item in items:
            item.request.begin_step()
            item.step = self._ahead.pop(item.request, None)
        new = [item for item in items if item.step is None]
        if new:
            self._propose_and_verify(new, shared=len(items) > 1)
        running = _without_errors(items)
        steps = [item.step for item in running if item.step is not None]
        following = self._compute(running, steps)
        # All steps of a forward share one array of choices, which is copied to the host once.
        arrays = {id(step.choices): step.choices for step in steps}
        choices: dict[int, Any] = {key: array.tolist() for key, array in arrays.items()}
        for item, step in zip(running, steps, strict=True):
            with item:
                if item.error is None:
                    rows = slice(step.span.first, step.span.end)
                    kept, tokens = item.request.accept(step, choices[id(step.choices)][rows])
                    ahead = following.get(item.request)
                    item.event = item.request.commit(step, rows=kept, tokens=tokens, ahead=ahead)
                    if ahead is not None:
                        self._ahead[item.request] = ahead
        self._steps += 1
        if self._steps % SPAN == 0:  # sessions without a slot clear MLX's cache themselves
            mx.clear_cache()
        observed = new or items  # of the new forward, or of the one that started ahead if none is
        if self._allocator is not None and len(observed) > 1:
            events = [(item.request, item.event) for item in observed if item.event is not None]
            went_ahead = any(request in self._ahead for request, _ in events)
            self._allocator.observe([len(event.tokens) for _, event in events], went_ahead)

    def _propose_and_verify(self, items: Sequence[BatchItem], shared: bool) -> None:
        """Propose rows for the items and set their steps, lazily.

        `shared` says whether several requests take part in this step.
        """
        self.propose(items)
        for item in _without_errors(items):
            with item:
                self._target.check(item.proposal)
        drafting = _without_errors(items)
        if drafting:
            drafts = [item.proposal.tokens for item in drafting]
            compute([draft for draft in drafts if isinstance(draft, mx.array)], wait=False)
            for item, step in zip(drafting, self._verify(drafting, shared), strict=True):
                item.step = step

    def _compute(self, items: Sequence[BatchItem], steps: Sequence[Step]) -> dict[Request, Step]:
        """Wait for the requests' steps, and start the next plain steps if all can go ahead.

        Up to two forwards run at once: the one that started ahead, and the one for requests that
        had not. The following one is built while they run, and starts once both have finished: MLX
        writes to an array in place only if no running forward reads it, and otherwise would copy
        all keys and values.
        """
        # All steps of a forward share the same arrays, so each is computed once.
        by_forward = {id(step.choices): (step.choices, step.taps) for step in steps}
        arrays = list(by_forward.values())
        pairs = zip(items, steps, strict=True)
        following: dict[Request, Step] = {}
        if self._can_go_ahead(items) and all(
            item.request.can_go_ahead(step) for item, step in pairs
        ):
            compute(arrays, wait=False)
            following = self._go_ahead(items, steps)
        compute(arrays)
        if following:
            any_step = next(iter(following.values()))
            compute(any_step.choices, any_step.taps, wait=False)
        return following

    def leave(self, request: Request) -> Step | None:
        """Remove a request that ends or gives its caches back.

        Returns the step that has started ahead for it; None if there is none.
        """
        return self._ahead.pop(request, None)

    def _go_ahead(self, items: Sequence[BatchItem], steps: Sequence[Step]) -> dict[Request, Step]:
        """Build the plain steps that follow these plain steps."""
        for item, step in zip(items, steps, strict=True):
            with item:
                item.request.keep(step, [0], [item.request.anchor])
                item.proposal = PLACEHOLDER
        steps = [step for item, step in zip(items, steps, strict=True) if item.error is None]
        items = _without_errors(items)
        if not items:
            return {}
        # Often, all tokens come from one forward in the order of these items: then its array is
        # taken as it is.
        tokens = steps[0].choices
        in_order = [
            step.choices is tokens and step.span.first == number
            for number, step in enumerate(steps)
        ]
        if len(steps) != tokens.size or not all(in_order):
            rows = [step.choices[step.span.first : step.span.end] for step in steps]
            tokens = mx.concatenate(rows)
        following = self._verify(items, len(items) > 1, tokens)
        for item in items:
            item.target_session.commit([0])
        return {item.request: step for item, step in zip(items, following, strict=True)}

    def _verify(
        self, items: Sequence[BatchItem], shared: bool, tokens: mx.array | None = None
    ) -> list[Step]:
        """Verify the proposals of the requests in one forward, lazily.

        Args:
            items: one per request.
            shared: whether several requests take part in this step.
            tokens: [R], the tokens of steps that start ahead, whose proposals are `PLACEHOLDER`.
        """
        logits, taps = self.verify(items, tokens)
        ahead = tokens is not None
        vocab_size = logits.shape[-1]
        rows = [
            item.request.sampler.rows(item.proposal, vocab_size, int(ahead), guard=item)
            for item in items
        ]
        choices = sample(rows, logits)
        return [
            Step(item.span, choices=choices, taps=taps, shared=shared, ahead=ahead)
            for item in items
        ]

    def verify(
        self, items: Sequence[BatchItem], tokens: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Run one forward over the rows of all proposals.

        Returns the logits [R, V] after each row, and the taps [1, R, K*D].
        """
        for item in items:
            item.span = Span(item.target_session, item.proposal)
        rows = Rows([item.span for item in items], tokens, slots=self._slots)
        return self._target.forward(rows)

    def propose(self, items: Sequence[BatchItem]) -> None:
        """Set the proposals. For several requests, the allocator decides their lengths."""
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
                    request = item.request
                    session = request.caches.draft_session
                    draft = BlockDraft(session, request.anchor, width=count, guard=item)
                    chains.append((item, draft))
                else:
                    item.proposal = checked(candidate.propose(count), count)
        drafts = draft_batch([draft for _, draft in chains])
        for (item, draft), proposal in zip(chains, drafts, strict=True):
            if item.error is None:
                with item:
                    item.proposal = checked(proposal, draft.width)

    def _set_candidates(self, items: Sequence[BatchItem]) -> None:
        """Set the rows that each request offers to verify. Trees are drafted here, in one pass."""
        trees: list[tuple[BatchItem, TreeCandidate]] = []
        for item in items:
            with item:
                item.candidate = item.request.candidate()
                if isinstance(item.candidate, TreeCandidate):
                    trees.append((item, item.candidate))
        drafts = draft_batch(
            [
                BlockDraft(
                    candidate.session,
                    anchor=item.request.anchor,
                    width=candidate.width,
                    tree_rows=candidate.rows,
                    guard=item,
                )
                for item, candidate in trees
            ]
        )
        for (item, candidate), tree in zip(trees, drafts, strict=True):
            if item.error is None:
                with item:
                    item.candidate = candidate.ready(tree)

    def read(self, ends: Sequence[Span]) -> list[Any]:
        """Read the ends of prompts in one forward, for `Request.read`; [] if that is impossible."""
        sharing = self._target.sharing
        if len(ends) < 2 or sharing is None or not sharing.reads_prompts:
            return []
        return self._target.read(ends)

    def _can_go_ahead(self, items: Sequence[BatchItem]) -> bool:
        """Whether the next step of these requests may start before this one is read."""
        if len(items) == 1:
            return True
        if self._allocator is None:
            return all(item.request.stats.block_size == 1 for item in items)
        return self._allocator.can_pipeline


def _slot_order(item: BatchItem) -> tuple[int, int]:
    """The sort key that puts requests in the order of their slots, those without one first."""
    slot = item.target_session.slot
    return (0, 0) if slot is None else (slot.array.capacity, slot.index)


def _without_errors(items: Sequence[BatchItem]) -> list[BatchItem]:
    """The items whose requests have not failed in this step."""
    return [item for item in items if item.error is None]
