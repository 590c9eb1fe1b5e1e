"""One request between its forwards: what it proposes, and what it makes of the target's answer.

Nothing here runs the target. So the loop can verify one request's proposal at a time, and an
engine the proposals of many requests together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from .accept import accept
from .choices import Decision
from .conversation import Conversation
from .errors import ProposalError
from .events import Event, Stats
from .policy.outcome import Outcome
from .policy.rounds import Rounds
from .proposal import Proposal
from .sampling import Sampler
from .stream import TextStream
from .target import TargetSession


class Request:
    """A validated request, and how far it has come.

    Args:
        conversation: the caches that it goes on with, ready for it.
        prompt: its token ids.
        sampler, rounds, text: how tokens are chosen, what rounds propose, where the text ends.
        stats: counted here.
    """

    def __init__(
        self,
        conversation: Conversation,
        prompt: list[int],
        sampler: Sampler,
        rounds: Rounds,
        text: TextStream,
        stats: Stats,
    ) -> None:
        self.stats = stats
        self._conversation, self._prompt = conversation, prompt
        self._sampler, self._rounds, self._text = sampler, rounds, text
        self._anchor: int  # the last token of the text so far, which no cache holds yet
        self._proposal: Proposal
        self._decision: Decision  # of this round, and the features of its rows
        self._taps: mx.array
        self._clock = 0.0  # when the prefill or this round began

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

    def prefill(self) -> Event:
        """Read the prompt, forward by forward; the target's choice after it is the first token."""
        self._clock = time.perf_counter()
        for logits in self._conversation.prefill(self._prompt):
            if logits is not None:
                event = self.begin(logits)
        return event

    def begin(self, logits: mx.array) -> Event:
        """Take the target's answer to the prompt: the first anchor, which is text already.

        Args:
            logits: [1, V] after the prompt's last token.
        """
        asked = Proposal([self._prompt[-1]])
        _, choices, sure = self._sampler.choose(asked, logits, self._rounds.asks_certainty)
        (self._anchor,) = choices
        piece, stats = self._text.add(choices), self.stats
        self._sampler.commit(choices)
        self._rounds.begin(sure[0] if sure else None)
        stats.output_tokens = len(piece.tokens)
        stats.peak_bytes = mx.get_peak_memory()
        stats.prefill_seconds = stats.first_token_seconds = time.perf_counter() - self._clock
        return Event(piece.text, piece.tokens, 0, 0, piece.finish_reason, stats)

    def propose(self) -> Proposal:
        """The rows to verify now, the anchor first. Nothing waits, but for trees.

        Raises `ProposalError` when the drafter hands over more rows than were asked for.
        """
        self._clock = time.perf_counter()
        # A round that accepts everything still adds a token of the target's own.
        limit = min(self.stats.block_size, self._text.remaining)
        conversation = self._conversation
        self._proposal = self._rounds.propose(
            conversation.drafter, self._anchor, conversation.target.position, limit
        )
        return self._proposal

    def decide(self, logits: mx.array, taps: mx.array) -> mx.array:
        """The target's answer to what was proposed, as numbers [M] int32 for `absorb`.

        Lazy: reading them is the round's only wait for the device, and many requests' can be
        waited for together.

        Args:
            logits: [N, V] after each of the proposal's N rows.
            taps: [1, N, K*D], the features of these rows.
        """
        self._taps = taps
        self._decision = self._sampler.decide(self._proposal, logits, self._rounds.asks_certainty)
        return self._decision.values

    def absorb(self, values: Sequence[int]) -> Event:
        """Take the numbers that `decide` asked for: accept, commit, emit.

        Raises `ProposalError` for a proposal that does not begin with the anchor.
        """
        proposal, anchor, taps = self._proposal, self._anchor, self._taps
        tokens, choices, sure = self._sampler.take(self._decision, values)
        if tokens[0] != anchor:
            raise ProposalError(f"A proposal starts with {tokens[0]}, not its anchor {anchor}.")

        # accept
        kept, self._anchor = accept(tokens, proposal.parents, choices)
        certainty = sure[kept[-1]] if sure else None
        certain = [*(tokens[row] for row in kept[1:]), self._anchor]
        drafted, right = len(proposal) - 1, len(kept) - 1
        piece = self._text.add(certain)
        kept = kept[: len(piece.tokens)]  # what was right after the end is not text

        # commit
        self.target.commit(kept)
        on_a_path = kept[-1] >= len(kept)  # with rejected siblings in between
        taps = taps[:, mx.array(kept)] if on_a_path else taps[:, : len(kept)]
        self._conversation.extend([tokens[row] for row in kept], taps)
        self._sampler.commit(certain)

        # emit
        accepted, stats = min(right, len(piece.tokens)), self.stats
        stats.count_round(drafted, accepted, len(piece.tokens), tree=not proposal.is_chain)
        stats.peak_bytes = mx.get_peak_memory()
        seconds = time.perf_counter() - self._clock
        stats.decode_seconds += seconds
        self._rounds.observe(Outcome(proposal, right, certain, certainty, seconds))
        return Event(piece.text, piece.tokens, accepted, drafted, piece.finish_reason, stats)
