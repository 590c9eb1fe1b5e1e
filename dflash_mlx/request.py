"""One request's state, and the parts of a step.

`loop.decode` puts these parts together for one request, `engine.shared_batch` for many.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .accept import accept
from .errors import ProposalError
from .events import Event, Stats
from .pair_caches import Caches
from .policy.planner import DraftCandidate, Planner, TreeCandidate
from .proposal import Proposal
from .sampling import Sampler, check_choice, sample
from .stream import Piece, TextStream
from .targets.rows import Rows
from .targets.session import PREFILL_STEP
from .targets.span import Span


@dataclass(frozen=True)
class Step:
    """Rows that the target has verified, perhaps in a forward that several requests share.

    Attributes:
        span: the N rows of the request.
        choices: [R] integers, the target's token after each row of the forward. Lazy.
        taps: [1, R, K*D], the rows' features. Lazy.
        shared: whether other requests were part of the step.
        ahead: whether it is a plain step that started before the previous step was read. The
            target's session has committed its row already.
    """

    span: Span
    choices: mx.array
    taps: mx.array
    shared: bool = False
    ahead: bool = False

    @property
    def proposal(self) -> Proposal:
        """The tokens of the rows; those of a step that started ahead are not known yet."""
        return self.span.proposal


class Request:
    """A validated request and its progress.

    Args:
        caches: new ones, or those of a conversation.
        prompt: token ids.
        sampler: chooses the tokens.
        planner: chooses the draft lengths.
        text: turns tokens into text, and says where it ends.
        stats: counted here.
        branches: see `prompt.branch_points`.

    Attributes:
        caches, sampler, stats: as given.
        ended: whether another request may use the caches.
        anchor: the last token of the text, which is not in the caches yet; set by the prefill.
    """

    anchor: int

    def __init__(
        self,
        caches: Caches,
        prompt: list[int],
        sampler: Sampler,
        planner: Planner,
        text: TextStream,
        stats: Stats,
        branches: Sequence[int] = (),
    ) -> None:
        self.caches = caches
        self.sampler = sampler
        self.stats = stats
        self.ended = False
        self._planner = planner
        self._text = text
        self._branches = branches
        self._tokens = list(prompt)  # all of them, the anchor last once there is one
        self._clock = 0.0  # when the step began, or reading the prompt

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
    def uncached_tokens(self) -> int:
        """Tokens that are still to be read."""
        return len(self._to_cache) - self.caches.target_session.position

    @property
    def _to_cache(self) -> list[int]:
        """The tokens that the caches must hold before the next step."""
        return self._tokens[: max(self.stats.prompt_tokens, len(self._tokens) - 1)]

    def empty_event(self) -> Event:
        """The event of a request for no tokens, which needs no forward."""
        return Event("", [], 0, 0, self._text.finish_reason, self.stats)

    # Between steps

    def resume(self) -> None:
        """Get the caches ready for the tokens that they do not hold."""
        held = self.caches.resume(self._to_cache, self.sampler, self._branches)
        self._clock = 0.0
        if not self.stats.output_tokens:
            self.stats.reused_tokens = held

    def prefill(self) -> Event | None:
        """Read all tokens that the caches do not hold. Returns what the last `read` returned."""
        event = None
        chunk = self.next_chunk()
        while chunk:
            event = self.read(chunk)
            chunk = self.next_chunk()
        return event

    def next_chunk(self, most: int = PREFILL_STEP) -> Span | None:
        """What `read` has to read next, `most` tokens or fewer; None at the end."""
        self._clock = self._clock or time.perf_counter()
        return self.caches.next_chunk(most)

    def read(self, chunk: Span) -> Event | None:
        """Read a chunk of the tokens that the caches do not hold, and return its event."""
        [(logits, taps)] = self.caches.target.read([chunk])
        return self.keep_read(chunk, logits, taps)

    def keep_read(self, chunk: Span, logits: mx.array | None, taps: mx.array) -> Event | None:
        """Take in a chunk of the prompt that the target has read.

        Returns the event of the text's first token after the prompt's last chunk, if the text is
        still empty; otherwise None. The drafter gets the features after the token is chosen, so
        that the token need not wait for them.

        Args:
            chunk: what was read.
            logits: [1, V] after the prompt's last token; None before.
            taps: its features [1, S, K*D], which may still be lazy.
        """
        event = None
        if logits is not None and not self.stats.output_tokens:
            event = self._choose_first(logits)
        self.caches.keep_prompt(chunk, taps)
        return event

    def finish_prompt(self) -> None:
        """Do what did not have to delay the event of the first token."""
        self.caches.finish_prompt()

    def _choose_first(self, logits: mx.array) -> Event:
        """Choose the first anchor from the logits [1, V] after the prompt. It is text already."""
        rows = self.sampler.rows(Proposal([self._tokens[-1]]), logits.shape[-1])
        choices: Any = sample([rows], logits).tolist()
        check_choice(choices[0])
        self.anchor = choices[0]
        self._tokens += choices
        piece = self._text.add(choices)
        self.sampler.commit(choices)
        stats = self.stats
        stats.output_tokens = len(piece.tokens)
        stats.peak_bytes = mx.get_peak_memory()
        stats.prefill_seconds = time.perf_counter() - self._clock
        stats.first_token_seconds = stats.prefill_seconds
        return Event(piece.text, piece.tokens, 0, 0, piece.finish_reason, stats)

    def release_caches(self, ahead: Step | None = None) -> None:
        """Give the caches back, whatever their state. `resume` and `read` rebuild them.

        The text then continues as if nothing had happened: the noise depends on seed and position,
        and the state of the sampler and the text stays here.

        Args:
            ahead: a step that has started, if there is one.
        """
        try:
            self._store(ahead)
        finally:
            self.caches.drop()

    def close(self, ahead: Step | None = None) -> None:
        """End the request, and leave the caches to others; `ahead` as in `release_caches`."""
        try:
            self._store(ahead)
        finally:
            self.caches.end_request()
            self.ended = True

    def _store(self, ahead: Step | None) -> None:
        """Store for other requests what the caches hold.

        After a step that failed in the middle, nothing is stored: the caches notice that.
        """
        if ahead is not None:
            self.keep(ahead, [0], [self.anchor])
        self.caches.store()

    # A step, in order

    def begin_step(self) -> None:
        """Begin a step, whose time counts from now on."""
        self._clock = time.perf_counter()

    @property
    def _width(self) -> int:
        """The most rows of a path: w rows, the anchor's included, bring up to w new tokens."""
        return min(self.stats.block_size, self._text.remaining)

    def propose(self) -> Proposal:
        """The rows to verify, the anchor first. Waits for the device only to draft a tree.

        Raises `ProposalError` if the drafter returns more rows than it was asked for.
        """
        return self._planner.propose(self.caches.draft_session, self.anchor, self._width)

    def candidate(self) -> DraftCandidate | TreeCandidate:
        """The rows that could be verified now, in a step that other requests share."""
        return self._planner.candidate(self.caches.draft_session, self.anchor, self._width)

    def verify(self, proposal: Proposal) -> Step:
        """Have the target choose a token after each row, in one forward. Lazy."""
        span = Span(self.caches.target_session, proposal)
        logits, taps = self.caches.target.forward(Rows([span]))
        rows = self.sampler.rows(proposal, logits.shape[-1])
        return Step(span, sample([rows], logits), taps)

    def can_go_ahead(self, step: Step) -> bool:
        """Whether the next step can start before this one is read: both of them are plain.

        If this step turns out to end the text, the next one has read the text's last token.
        """
        if len(step.proposal) > 1 or self._text.remaining < 2:
            return False
        if not (self.sampler.can_pipeline and self.caches.target_session.can_pipeline):
            return False
        planner = self._planner
        decides = planner.finds_no_draft if step.shared else planner.next_is_plain
        return decides(self.caches.draft_session, self.anchor, self._width)

    def go_ahead(self, step: Step) -> Step:
        """Verify the token that a plain step is about to choose: the next plain step. Lazy."""
        self.keep(step, [0], [self.anchor])
        span = Span(self.caches.target_session, Proposal(step.choices))
        logits, taps = self.caches.target.forward(Rows([span]))
        span.session.commit([0])
        rows = self.sampler.rows(span.proposal, logits.shape[-1], ahead=1)
        return Step(span, sample([rows], logits), taps, ahead=True)

    def accept(self, step: Step, choices: list[int]) -> tuple[list[int], list[int]]:
        """Follow the target's choices through the proposal.

        Args:
            step: of this request.
            choices: [N] after the proposal's rows, read from the device.

        Returns:
            The proposal's kept rows from its root down, and the new tokens, the next anchor last.

        Raises `ProposalError` for a proposal that does not begin with the anchor, or that has a
        token outside the vocabulary.
        """
        if step.ahead:  # its row is the anchor
            check_choice(choices[0])
            return [0], choices
        tokens: Any = step.proposal.tokens
        if isinstance(tokens, mx.array):
            tokens = tokens.tolist()
        if tokens[0] != self.anchor:
            raise ProposalError(
                f"A proposal starts with {tokens[0]}, not its anchor {self.anchor}."
            )
        size = self.caches.target.vocab_size
        if min(tokens) < 0 or max(tokens) >= size:
            beyond = next(token for token in tokens if not 0 <= token < size)
            raise ProposalError(
                f"A proposal is wrong: the vocabulary of {size} has no token {beyond}."
            )
        rows, new = accept(tokens, step.proposal.parents, choices)
        check_choice(new[-1])
        return rows, new

    def commit(
        self, step: Step, rows: list[int], tokens: list[int], ahead: Step | None = None
    ) -> Event:
        """Keep the accepted rows in the caches, and add the new tokens to the text.

        Args:
            step: of this request.
            rows, tokens: from `accept`.
            ahead: the next step, if it has started.
        """
        piece = self._text.add(tokens)
        if ahead is None:  # else the caches have its row
            used = len(piece.tokens)  # tokens after the end of the text are not kept
            self.keep(step, rows[:used], [self.anchor, *tokens][:used])
        self.sampler.commit(tokens)
        self._tokens += tokens
        self.anchor = tokens[-1]
        return self._account(step, tokens, piece, ahead)

    def keep(self, step: Step, rows: list[int], tokens: list[int]) -> None:
        """Keep these rows of a step, which have read these tokens, in the caches of both models."""
        if not step.ahead:
            step.span.session.commit(rows)
        self.caches.feed_drafter(tokens, step.taps, [step.span.first + row for row in rows])

    def _account(self, step: Step, tokens: list[int], piece: Piece, ahead: Step | None) -> Event:
        """Count a step, and have the planner learn from it; its event."""
        seconds = time.perf_counter() - self._clock
        stats = self.stats
        drafted = len(step.proposal) - 1
        accepted = min(len(tokens) - 1, len(piece.tokens))
        stats.count_step(drafted, accepted, len(piece.tokens), tree=not step.proposal.is_chain)
        stats.decode_seconds += seconds
        stats.first_round_seconds = stats.first_round_seconds or seconds
        stats.peak_bytes = mx.get_peak_memory()
        if step.shared:
            self._planner.observe_shared(step.proposal, tokens)
        else:
            # The first step of a plain run also starts the next forward, and the last one waits for
            # a forward that had started: neither takes as long as one forward.
            is_whole = step.ahead == (ahead is not None)
            self._planner.observe(step.proposal, tokens, seconds if is_whole else None)
        return Event(piece.text, piece.tokens, accepted, drafted, piece.finish_reason, stats)
