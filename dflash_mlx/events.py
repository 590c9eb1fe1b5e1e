"""What a generation tells its caller: an event as text comes, and counters of the request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .validation import brief

FinishReason = Literal["stop", "length", "cancelled"]  # the last by `Job.cancel` alone


@dataclass(repr=False)
class Stats:
    """Counters of one request.

    The prefill brings the first token. A *round* is one verify forward of the target after it; it
    always yields at least one token, so plain decoding has a round for every further token. What
    rounds bring is judged by their own tokens alone: the first one is no drafter's.

    MLX counts its peak memory for the whole process and from its start on. So `peak_bytes` has in
    it what ran before and beside this request. For the peak of one request let it run alone, after
    `mx.reset_peak_memory()`, as `dflash-mlx bench` does; no request resets it for the others.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, which a conversation's caches held already
    output_tokens: int = 0  # the EOS token included, when there is one
    rounds: int = 0
    drafted_tokens: int = 0  # rows verified beyond the anchor
    accepted_tokens: int = 0  # drafted tokens in the output
    prefill_seconds: float = 0.0  # the choice of the first token included
    decode_seconds: float = 0.0  # of all rounds
    first_token_seconds: float = 0.0  # from the start to the first token
    peak_bytes: int = 0  # the most memory that MLX has held in this process so far, see above
    block_size: int = 1  # the widest round allowed; 1 is plain decoding
    seed: int | None = None  # of the sampling noise; None for greedy decoding
    accepted_per_round: list[int] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)  # rows of a round -> such rounds
    trees: dict[int, int] = field(default_factory=dict)  # the same of those that were no chains

    def __repr__(self) -> str:
        """A line of what matters most; every counter is an attribute."""
        return (
            f"Stats(output_tokens={self.output_tokens}, rounds={self.rounds}, "
            f"acceptance_length={self.acceptance_length:.2f}, "
            f"tokens_per_second={self.tokens_per_second:.0f})"
        )

    def count_round(self, drafted: int, accepted: int, emitted: int, tree: bool = False) -> None:
        """Add one verify forward that kept `accepted` of `drafted` and emitted tokens."""
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
        """Output tokens that rounds brought: all but the first, which is the prefill's."""
        return max(0, self.output_tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the rounds per second of decoding, the prefill left out."""
        return self.round_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify forward (tau in the DFlash paper); 1.0 without drafting."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that the target kept, 0..1."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


@dataclass(frozen=True)
class Event:
    """What the prefill or one round made certain.

    `text` can lag behind `tokens`: characters are held back while they may be half of a UTF-8
    sequence or the start of a stop string.
    """

    text: str
    tokens: list[int]
    accepted: int  # drafted tokens among `tokens`
    drafted: int  # drafted tokens verified in this round
    finish_reason: FinishReason | None  # set on the last event only
    stats: Stats  # the request's counters so far; they go on counting


@dataclass(frozen=True, repr=False)
class Result:
    """A finished generation."""

    text: str
    tokens: list[int]  # with the EOS token that ended the text, if one did
    finish_reason: FinishReason
    stats: Stats

    def __repr__(self) -> str:
        """A line: how the text begins, why it ended, and what it took."""
        reason = f"finish_reason={self.finish_reason!r}"
        return f"Result(text={brief(self.text)}, {reason}, stats={self.stats!r})"
