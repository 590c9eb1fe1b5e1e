"""One request's state, and the parts of a step.

`loop.step` puts these parts together for one request, `engine.batch` for many.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .accept import accept
from .conversation import Conversation
from .drafter.protocol import DraftSession
from .errors import ProposalError
from .events import Event, Stats
from .policy.planner import DraftCandidate, Planner, TreeCandidate
from .proposal import Proposal
from .sampling import Decision, Sampler, check_choice, decide_all
from .stream import TextStream
from .targets import TargetSession
from .targets.session import PREFILL_STEP, PromptEnd


@dataclass
class PendingStep:
    """A request's step whose forward was started and whose choices were not read yet.

    Attributes:
        proposal: the rows that the target verifies.
        choices: [R] int32, the target's token after each row of all requests in the forward.
        taps: [1, R, K*D], the rows' features.
        first: the first of the request's own rows among them.
        vocab_size: V of the target's logits.
        pipelined: whether it started before the step before it was read. The target has committed
            its one row then.
        extended: whether the drafter has the row's features.
    """

    proposal: Proposal
    choices: mx.array
    taps: mx.array
    first: int
    vocab_size: int
    pipelined: bool
    extended: bool = False


class Request:
    """A validated request and its progress.

    Args:
        conversation: the caches to use.
        prompt: its token ids.
        sampler: chooses the tokens.
        planner: chooses the draft lengths.
        text: turns tokens into text, and says where it ends.
        stats: counted here.
        branches: see `prompt.branch_points`.

    Attributes:
        stats: as given.
        ended: whether another request may use the conversation.
        target_session: the target's session, from `resume` to `release_caches`.
        draft_session: the drafter's session.
        anchor: the last token of the text, which is not in the caches yet; set by the prefill.
    """

    target_session: TargetSession
    draft_session: DraftSession
    anchor: int

    def __init__(
        self,
        conversation: Conversation,
        prompt: list[int],
        sampler: Sampler,
        planner: Planner,
        text: TextStream,
        stats: Stats,
        branches: Sequence[int] = (),
    ) -> None:
        self.stats = stats
        self.ended = False
        self._conversation = conversation
        self._sampler, self._planner, self._text = sampler, planner, text
        self._tokens = list(prompt)  # all of them, the anchor last once there is one
        self._branches = branches
        self._pending: deque[PendingStep] = deque()  # this step, and perhaps the next one
        self._clock, self._shared = 0.0, False  # when the step began; whether others share it
        self._width = 1
        self._consistent = False  # whether caches and text agree: between two steps

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self._text.finish_reason is not None

    @property
    def tokens(self) -> int:
        """Tokens of prompt and text so far."""
        return len(self._tokens)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self._text.remaining

    @property
    def kv_bits(self) -> int | None:
        """The bits of the target's keys and values; None if they are not quantized."""
        return self._conversation.kv_bits

    @property
    def slot_order(self) -> tuple[int, int]:
        """What sorts a batch's requests by their slots; those without one come first."""
        slot = self.target_session.slot
        return (0, 0) if slot is None else (slot.array.capacity, slot.index)

    @property
    def uncached_tokens(self) -> int:
        """Tokens that `prefill` has still to read."""
        return len(self._to_cache) - self.target_session.position

    @property
    def _to_cache(self) -> list[int]:
        """The tokens that the caches must hold before the next step."""
        return self._tokens[: max(self.stats.prompt_tokens, len(self._tokens) - 1)]

    def empty_event(self) -> Event:
        """The event of a request for no tokens, which needs no forward."""
        return Event("", [], 0, 0, self._text.finish_reason, self.stats)

    # Between steps

    def resume(self) -> None:
        """Get the caches ready for `prefill`."""
        held = self._conversation.resume(self._to_cache, self._sampler, self._branches)
        self.target_session, self.draft_session = (
            self._conversation.target_session,
            self._conversation.draft_session,
        )
        if not self.stats.output_tokens:
            self.stats.reused_tokens = held

    def prefill(
        self, chunk: Callable[[], int] = lambda: PREFILL_STEP
    ) -> Iterator[Event | PromptEnd | None]:
        """Read the tokens that the caches do not hold, at most one forward per iteration.

        Yields None after each forward but the last, and before that a `PromptEnd`, as
        `Conversation.prefill` does. If the text is still empty, the last one yields the event of
        its first token, which the target chooses after the prompt.

        Args:
            chunk: returns the most tokens of the next forward.
        """
        self._clock = time.perf_counter()
        event = None
        for found in self._conversation.prefill(self._to_cache, chunk):
            if not isinstance(found, mx.array):
                yield found
            elif not self.stats.output_tokens:
                event = self._choose_first(found)
        self._consistent = True
        if event is not None:
            yield event

    def _choose_first(self, logits: mx.array) -> Event:
        """Choose the first anchor from the logits [1, V] after the prompt. It is text already."""
        choices: Any = self._sampler.decide(Proposal([self._tokens[-1]]), logits).tolist()
        check_choice(choices[0])
        self.anchor = choices[0]
        self._tokens += choices
        piece, stats = self._text.add(choices), self.stats
        self._sampler.commit(choices)
        stats.output_tokens = len(piece.tokens)
        stats.peak_bytes = mx.get_peak_memory()
        stats.prefill_seconds = stats.first_token_seconds = time.perf_counter() - self._clock
        return Event(piece.text, piece.tokens, 0, 0, piece.finish_reason, stats)

    def release_caches(self) -> None:
        """Give the caches back, whatever their state. `resume` and `prefill` rebuild them.

        The text then continues as if nothing had happened: the noise depends on seed and position,
        and the state of the sampler and the text stays here.
        """
        try:
            self._store()
        finally:
            self._consistent = False  # `close` has nothing to store
            self._conversation.drop_caches()
            del self.target_session, self.draft_session

    def rebuild(self) -> None:
        """Read all tokens into new caches."""
        self.release_caches()
        self.resume()
        for _ in self.prefill():
            pass

    def close(self) -> None:
        """End the request, and release its conversation."""
        try:
            self._store()
        finally:
            self._conversation.leave_batch()
            self.ended = True

    def _store(self) -> None:
        """Store what the caches hold for other requests, unless a step has failed in the middle."""
        pipelined = self._pending[0] if self._pending else None
        self._pending.clear()
        if self._consistent and self._conversation.flush_features():
            if pipelined is not None:
                self._extend_plain(pipelined)
            self._conversation.store()

    # A step, in order

    def begin_step(self, shared: bool = False) -> bool:
        """Begin a step; whether the last one has started it, so that nothing is to be proposed.

        Args:
            shared: whether other requests are part of it.
        """
        clock = time.perf_counter()
        self._consistent = False
        if not self._conversation.flush_features():  # another thread did the prefill
            self.rebuild()
        self._clock, self._shared, self._consistent = clock, shared, False
        # The most rows of a path: if all are accepted, the target still adds its own token.
        self._width = min(self.stats.block_size, self._text.remaining)
        if not self._pending:
            return False
        self._extend_plain(self._pending[0])
        return True

    def propose(self) -> Proposal:
        """The rows to verify, the anchor first. Waits for the device only to draft a tree.

        Raises `ProposalError` if the drafter returns more rows than it was asked for.
        """
        return self._planner.propose(self.draft_session, self.anchor, self._width)

    def candidate(self) -> DraftCandidate | TreeCandidate:
        """The rows that could be verified now, in a step that other requests share."""
        return self._planner.candidate(self.draft_session, self.anchor, self._width)

    @property
    def pending(self) -> PendingStep:
        """The step of the last forward."""
        return self._pending[-1]

    @property
    def can_start_next(self) -> bool:
        """Whether the next step can start before this one is read: both of them are plain.

        The text may end with this step. Then the next one's row is its last token.
        """
        return (
            self._text.remaining >= 2
            and len(self._pending[-1].proposal) == 1
            and self._sampler.can_pipeline
            and self.target_session.can_pipeline
            and self._planner.can_pipeline(
                self.draft_session, self.anchor, self._width, self._shared
            )
        )

    @property
    def is_pipelined(self) -> bool:
        """Whether a step has started that was not read yet."""
        return bool(self._pending)

    def commit_unread(self) -> None:
        """Commit this plain step's row, before the token after it is known."""
        [step] = self._pending
        if not step.pipelined:
            self.target_session.commit([0])
        self._extend_plain(step)

    def _extend_plain(self, step: PendingStep) -> None:
        """Give the drafter the features of a plain step, once. The target has committed its row."""
        if not step.extended:
            self._conversation.feed_drafter([self.anchor], step.taps, [step.first])
            step.extended = True

    def accept(self, choices: list[int]) -> tuple[list[int], list[int]]:
        """Follow the target's choices through the proposal.

        Args:
            choices: [N] after the proposal's rows, read from the device.

        Returns:
            The proposal's kept rows from its root down, and the new tokens, the next anchor last.

        Raises `ProposalError` for a proposal that does not begin with the anchor, or that has a
        token outside the vocabulary.
        """
        step, anchor = self._pending[0], self.anchor
        if step.pipelined:  # its row was the anchor
            check_choice(choices[0])
            return [0], choices
        tokens: Any = step.proposal.tokens
        if isinstance(tokens, mx.array):
            tokens = tokens.tolist()
        if tokens[0] != anchor:
            raise ProposalError(f"A proposal starts with {tokens[0]}, not its anchor {anchor}.")
        size = step.vocab_size
        if min(tokens) < 0 or max(tokens) >= size:
            beyond = next(token for token in tokens if not 0 <= token < size)
            raise ProposalError(f"A proposal: the vocabulary of {size} has no token {beyond}.")
        rows, new = accept(tokens, step.proposal.parents, choices)
        check_choice(new[-1])
        return rows, new

    def commit(self, rows: list[int], tokens: list[int]) -> Event:
        """Keep the accepted rows in the caches, and add the new tokens to the text.

        Args:
            rows, tokens: from `accept`.
        """
        piece, step = self._text.add(tokens), self._pending[0]
        used = len(piece.tokens)  # what is right after the end of the text is not kept
        if not step.extended:
            self.target_session.commit(rows[:used])
            path = [self.anchor, *tokens]
            taps_rows = [step.first + row for row in rows[:used]]
            self._conversation.feed_drafter(path[:used], step.taps, taps_rows)
        self._sampler.commit(tokens)
        self._tokens += tokens
        self.anchor, self._consistent = tokens[-1], True
        self._pending.popleft()

        seconds = time.perf_counter() - self._clock
        drafted, kept = len(step.proposal) - 1, min(len(tokens) - 1, used)
        self.stats.count_step(drafted, kept, used, tree=not step.proposal.is_chain)
        self.stats.decode_seconds += seconds
        self.stats.first_round_seconds = self.stats.first_round_seconds or seconds
        self.stats.peak_bytes = mx.get_peak_memory()
        # A step that only starts or only ends a pipeline takes two forwards, or part of one.
        is_whole = step.pipelined == bool(self._pending)
        timed = seconds if is_whole else None
        self._planner.observe(step.proposal, tokens, timed, self._shared)
        return Event(piece.text, piece.tokens, kept, drafted, piece.finish_reason, self.stats)


def choose(
    requests: Sequence[Request],
    proposals: Sequence[Proposal],
    logits: mx.array,
    taps: mx.array,
    guards: Sequence[AbstractContextManager[Any]] = (),
) -> None:
    """Choose the target's token after each row of requests' proposals. Lazy; see `Request.pending`.

    Args:
        requests: of one forward.
        proposals: theirs, of R rows together.
        logits: [R, V] after each row.
        taps: [1, R, K*D], the rows' features.
        guards: see `Decision`.
    """
    guards = guards or [nullcontext()] * len(requests)
    parts = list(zip(requests, proposals, guards, strict=True))
    decisions = [Decision(one._sampler, of, len(one._pending), guard) for one, of, guard in parts]
    choices, first = decide_all(decisions, logits), 0
    for request, proposal, _ in parts:
        if pipelined := bool(request._pending):
            request.target_session.commit([0])
        step = PendingStep(proposal, choices, taps, first, logits.shape[-1], pipelined)
        request._pending.append(step)
        first += len(proposal)
