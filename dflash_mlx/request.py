"""One request between its forwards: what it proposes, and what it makes of the target's answer.

Nothing here runs a verify forward. So rounds can be those of one request, or of many together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .accept import accept
from .choices import Decision, chosen
from .conversation import Conversation
from .drafter.protocol import DraftSession
from .errors import ProposalError
from .events import Event, Stats
from .policy.offer import Offer, Planting
from .policy.outcome import Outcome
from .policy.rounds import Rounds
from .proposal import Proposal
from .sampling import Sampler
from .stream import TextStream
from .targets import TargetSession
from .targets.target import PREFILL_STEP


@dataclass
class _Round:
    """A round between its forward and what is read of it.

    Attributes:
        proposal: what the target read.
        decision: what is asked about it.
        taps: [1, N, K*D], the features of its rows.
        vocab_size: V, of the target's logits.
        kept: whether the target has committed its one row, and the drafter knows of it, already.
        ahead: whether it was begun before the one before it was read.
    """

    proposal: Proposal
    decision: Decision
    taps: mx.array
    vocab_size: int
    kept: bool = False
    ahead: bool = False


class Request:
    """A validated request, and how far it has come.

    Args:
        conversation: the caches that it goes on with, ready for it.
        prompt: its token ids.
        sampler, rounds, text: how tokens are chosen, what rounds propose, where the text ends.
        stats: counted here.
        ends: where other prompts will part from this one; see `Conversation.resume`.
    """

    def __init__(
        self,
        conversation: Conversation,
        prompt: list[int],
        sampler: Sampler,
        rounds: Rounds,
        text: TextStream,
        stats: Stats,
        ends: Sequence[int] = (),
    ) -> None:
        self.stats = stats
        self.ended = False  # whether its conversation is free for another
        self._conversation = conversation
        self._anchor: int | None = None  # the text's last token, which no cache holds yet
        self._ends = ends
        self._text_so_far = prompt  # as far as it was when the caches were last made ready,
        self._further: list[int] = []  # and what came after
        self._sampler, self._rounds, self._text = sampler, rounds, text
        self._round: _Round
        self._ahead: _Round | None = None  # the next one, if the device is at it already
        self._clock, self._shared = 0.0, False  # when this round began, and whether it is shared
        self._between_rounds = False  # what was read is whole

    @property
    def target(self) -> TargetSession:
        """The target's session, whose next forward is this request's."""
        return self._conversation.target

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self._text.finish_reason is not None

    def nothing(self) -> Event:
        """The event of a request that asks for no tokens: no forward is needed to emit nothing."""
        return Event("", [], 0, 0, self._text.finish_reason, self.stats)

    @property
    def drafter(self) -> DraftSession:
        """The drafter's session."""
        return self._conversation.drafter

    @property
    def anchor(self) -> int:
        """The last token of the text so far, which no cache holds yet. The prompt has been read."""
        assert self._anchor is not None
        return self._anchor

    @property
    def tokens(self) -> int:
        """Tokens of the text so far, the prompt's included."""
        return len(self._text_so_far) + len(self._further)

    @property
    def remaining(self) -> int:
        """How many it may still go on by."""
        return self._text.remaining

    @property
    def doubt(self) -> float:
        """How unsure the target was of the last few tokens; 0 where nobody asks."""
        return self._rounds.doubt

    @property
    def kv_bits(self) -> int | None:
        """Of the target's keys and values."""
        return self._conversation.kv_bits

    @property
    def _held(self) -> list[int]:
        """What the caches are to hold before the next round."""
        return self._text_so_far if self._anchor is None else self._text_so_far[:-1]

    @property
    def unread(self) -> int:
        """How many tokens `read` has still to read."""
        return len(self._held) - self.target.position

    def resume(self) -> None:
        """Get the caches ready for `read`."""
        held = self._conversation.resume(self._held, self._sampler, self._ends)
        if self._anchor is None:
            self.stats.reused_tokens = held

    def read(self, step: Callable[[], int] = lambda: PREFILL_STEP) -> Iterator[Event | None]:
        """Read what the caches do not hold yet, a forward a step; then rounds can follow.

        Yields None after each forward but the last; and in the end, where what was read is the
        prompt, the event of the first token, which is the target's choice after it.

        Args:
            step: says how many tokens the next forward may have.
        """
        self._clock, event = time.perf_counter(), None
        for logits in self._conversation.prefill(self._held, step):
            if logits is None:
                yield None
            elif self._anchor is None:
                event = self._begin(logits)
        self._between_rounds = True
        if event is not None:
            yield event

    def _begin(self, logits: mx.array) -> Event:
        """Take the target's answer to the prompt: the first anchor, which is text already.

        Args:
            logits: [1, V] after the prompt's last token.
        """
        asked = Proposal([self._text_so_far[-1]])
        _, choices, sure = self._sampler.choose(asked, logits, self._rounds.asks_certainty)
        self._anchor, self._further = chosen(choices[0]), choices
        piece, stats = self._text.add(choices), self.stats
        self._sampler.commit(choices)
        self._rounds.begin(sure[0] if sure else None)
        stats.output_tokens = len(piece.tokens)
        stats.peak_bytes = mx.get_peak_memory()
        stats.prefill_seconds = stats.first_token_seconds = time.perf_counter() - self._clock
        return Event(piece.text, piece.tokens, 0, 0, piece.finish_reason, stats)

    def suspend(self) -> None:
        """Give the caches back, in whatever state. After `resume` and `read` the text goes on.

        It goes on as if nothing had been: the noise is of the seed and the position, and what the
        text stream and the sampler know stays here.
        """
        self._keep()
        self._text_so_far = [*self._text_so_far, *self._further]
        self._further = []
        self._between_rounds = False  # nothing is held that a close could keep
        self._conversation.give_back()

    def close(self) -> None:
        """The request has ended; its conversation is free for another."""
        try:
            self._keep()
        finally:
            self.ended = True

    def _keep(self) -> None:
        """Store what was read, for others that begin so; not what a round that broke off left."""
        ahead, self._ahead = self._ahead, None
        if self._between_rounds and self._conversation.settle():
            if ahead is not None:
                self._tell(ahead, self.anchor)
            self._conversation.keep()

    def propose(self) -> Proposal:
        """The rows to verify now, the anchor first. Nothing waits, but for trees.

        Raises `ProposalError` when the drafter hands over more rows than were asked for.
        """
        return self._rounds.propose(self._conversation.drafter, *self._begin_round(shared=False))

    def offer(self, rest: bool = False) -> Offer | Planting:
        """The rows that could be verified now, in a round that other requests share.

        In a round of `rest` those that cost nothing to draft (`policy.rest`).
        """
        return self._rounds.offer(self.drafter, *self._begin_round(shared=True), rest)

    def _begin_round(self, shared: bool) -> tuple[int, int, int]:
        """The anchor, the tokens before it, and the most rows of a path."""
        clock = time.perf_counter()
        if not self._conversation.settle():  # another thread has read the prompt
            self.suspend()
            self.resume()
            for _ in self.read():
                pass
        self._clock, self._shared, self._between_rounds = clock, shared, False
        # A round that accepts everything still adds a token of the target's own.
        limit = min(self.stats.block_size, self._text.remaining)
        return self.anchor, self._conversation.target.position, limit

    def take_up(self, shared: bool) -> bool:
        """Go on with the round whose forward the last one has begun; whether there was one.

        Such a round is plain, and only `asked` is missing of it. Its anchor is known only now.
        """
        if self._ahead is None:
            return False
        anchor, context, limit = self._begin_round(shared)
        self._rounds.go_on(self.drafter, anchor, context, limit, shared)
        self._round, self._ahead = self._ahead, None
        self._tell(self._round, anchor)
        return True

    @property
    def plain_next(self) -> bool:
        """Whether the next round's forward can be begun before this one is read: it is plain.

        The text may end before it. Then its row stays in the caches: it is the text's last token.
        """
        return self._rounds.plain_next and self._text.remaining > 1 and self.can_pipeline

    @property
    def can_pipeline(self) -> bool:
        """Whether plain rounds of this request can be begun before the last one is read."""
        return self._sampler.can_pipeline and self.target.can_pipeline

    def next_row(self) -> Proposal:
        """The next round's one row, which this round decides: a number that nobody knows yet."""
        assert len(self._round.proposal) == 1, "a round behind which more than one row may be kept"
        if not self._round.kept:
            self.target.commit([0])
            self._tell(self._round, self.anchor)
        return Proposal(self._round.decision.next_anchor)

    def begin_next(
        self, proposal: Proposal, logits: mx.array, taps: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Take the target's answer to the next round's row, as `decide` does; what is `asked`."""
        decision = self._sampler.decide(proposal, logits, self._rounds.looks_next, ahead=1)
        self.target.commit([0])
        self._ahead = _Round(proposal, decision, taps, logits.shape[-1], ahead=True)
        return decision.values, taps

    def _tell(self, plain: _Round, anchor: int) -> None:
        """Let the drafter know a plain round's row, which the target has committed."""
        self._conversation.extend([anchor], plain.taps, [0])
        plain.kept = True

    def decide(self, proposal: Proposal, logits: mx.array, taps: mx.array) -> None:
        """Ask the target's answer to a proposal; see `asked`.

        Args:
            proposal: of N rows, as `propose` made it, or of those that were offered.
            logits: [N, V] after each of them.
            taps: [1, N, K*D], their features.
        """
        decision = self._sampler.decide(proposal, logits, self._rounds.asks_certainty)
        self._round = _Round(proposal, decision, taps, logits.shape[-1])

    @property
    def asked(self) -> tuple[mx.array, mx.array]:
        """The target's answer, as numbers [M] int32 for `absorb`, and the features [1, N, K*D].

        Lazy: reading them is the round's only wait for the device, and many requests' can be
        waited for together.
        """
        return self._round.decision.values, self._round.taps

    def absorb(self, values: list[int]) -> Event:
        """Take the numbers that were asked for: accept, commit, emit.

        Raises `ProposalError` for a proposal that does not begin with the anchor, or has a token
        that is none of the vocabulary's.
        """
        proposal, anchor, taps = self._round.proposal, self._anchor, self._round.taps
        tokens, choices, sure = self._sampler.take(self._round.decision, values)
        if tokens[0] != anchor:
            raise ProposalError(f"A proposal starts with {tokens[0]}, not its anchor {anchor}.")
        size = self._round.vocab_size
        if beyond := [token for token in tokens if not 0 <= token < size]:
            raise ProposalError(f"A proposal: the vocabulary of {size} has no token {beyond[0]}.")

        # accept
        kept, token = accept(tokens, proposal.parents, choices)
        self._anchor = chosen(token)
        certainty = sure[-1 if proposal.is_chain else kept[-1]] if sure else None
        drafted, right = len(tokens) - 1, len(kept) - 1
        path = [tokens[row] for row in kept]
        certain = [*path[1:], self._anchor]
        piece = self._text.add(certain)
        used = len(piece.tokens)
        kept, path = kept[:used], path[:used]  # what was right after the end is not text

        # commit
        if not self._round.kept:
            self._conversation.target.commit(kept)
            self._conversation.extend(path, taps, kept)
        self._sampler.commit(certain)
        self._further += certain
        self._between_rounds = True

        # emit
        accepted, stats = min(right, used), self.stats
        stats.count_round(drafted, accepted, used, tree=not proposal.is_chain)
        stats.peak_bytes = mx.get_peak_memory()
        seconds = time.perf_counter() - self._clock
        stats.decode_seconds += seconds
        ahead = self._round.ahead + (self._ahead is not None)
        outcome = Outcome(proposal, right, certain, certainty, seconds, self._shared, ahead)
        self._rounds.observe(outcome)
        return Event(piece.text, piece.tokens, accepted, drafted, piece.finish_reason, stats)
