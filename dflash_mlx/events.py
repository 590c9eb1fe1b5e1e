"""The values that a generation returns: an event per step, a result, and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .validation import brief

FinishReason = Literal["stop", "length", "cancelled"]  # only `Job.cancel` cancels


@dataclass(repr=False)
class Stats:
    """Counters of one request.

    The prefill produces the first token. A *round* is one step after it, with one verification
    forward of the target. It adds one or more tokens, so plain decoding has one round for each
    token after the first. Acceptance and speed count only the tokens of rounds.

    MLX measures peak memory per process, so `peak_bytes` includes whatever ran before this request
    or at the same time. To measure one request, run it alone after `mx.reset_peak_memory()`.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens that were already in the caches
    output_tokens: int = 0  # including the EOS token, if there is one
    rounds: int = 0
    drafted_tokens: int = 0  # rows verified beyond the anchor
    accepted_tokens: int = 0  # drafted tokens in the output
    prefill_seconds: float = 0.0  # including the choice of the first token
    decode_seconds: float = 0.0  # the time of all rounds
    first_round_seconds: float = 0.0  # the first round, in which the drafter reads the prompt
    first_token_seconds: float = 0.0  # from the start to the first token
    peak_bytes: int = 0  # MLX's peak memory in this process so far
    block_size: int = 1  # the most rows of a round; 1 is plain decoding
    seed: int | None = None  # the seed of the sampling noise; None for greedy decoding
    accepted_per_round: list[int] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)  # rows -> number of rounds with that many
    trees: dict[int, int] = field(default_factory=dict)  # the same, only for draft trees

    def __repr__(self) -> str:
        """Return the most important counters in one line."""
        return (
            f"Stats(output_tokens={self.output_tokens}, rounds={self.rounds}, "
            f"acceptance_length={self.acceptance_length:.2f}, "
            f"tokens_per_second={self.tokens_per_second:.0f})"
        )

    def count_step(self, drafted: int, accepted: int, emitted: int, tree: bool = False) -> None:
        """Count one step.

        Args:
            drafted: the number of drafted rows.
            accepted: how many of them were accepted.
            emitted: the number of new tokens.
            tree: whether the step drafted a tree.
        """
        self.rounds += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_per_round.append(accepted)
        rows = drafted + 1
        self.widths[rows] = self.widths.get(rows, 0) + 1
        if tree:
            self.trees[rows] = self.trees.get(rows, 0) + 1
        self.output_tokens += emitted

    @property
    def round_tokens(self) -> int:
        """Output tokens of the rounds: all but the first, which the prefill produced."""
        return max(0, self.output_tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the rounds, without the prefill."""
        return self.round_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification forward (tau in the DFlash paper); 1.0 without drafting."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that the target accepted, from 0 to 1."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


@dataclass(frozen=True)
class Event:
    """The text and tokens that the prefill or one step added.

    `text` can lag behind `tokens`: characters are held back while their UTF-8 bytes are incomplete,
    or while they may be the start of a stop string.
    """

    text: str
    tokens: list[int]
    accepted: int  # drafted tokens among `tokens`
    drafted: int  # drafted tokens verified in this step
    finish_reason: FinishReason | None  # set on the last event only
    stats: Stats  # the request's counters; later events share the object


@dataclass(frozen=True, repr=False)
class Result:
    """A finished generation."""

    text: str
    tokens: list[int]  # including the EOS token, if one ended the text
    finish_reason: FinishReason
    stats: Stats

    def __repr__(self) -> str:
        """Return one line with the start of the text, why it ended, and the counters."""
        reason = f"finish_reason={self.finish_reason!r}"
        return f"Result(text={brief(self.text)}, {reason}, stats={self.stats!r})"
