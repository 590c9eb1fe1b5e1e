"""What each decode step adds to an answer, in the words of no API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..answers.parser import Part, merge_texts
from ..events import Event, Stats
from .logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Finish:
    """Why an answer ended, and its counters."""

    reason: FinishReason
    stats: Stats
    reasoning_tokens: int
    stop_string: str | None = None  # the one that ended it


@dataclass(frozen=True)
class StepOutput:
    """What one decode step added to an answer.

    Attributes:
        choice: the index of the answer among the request's n.
        event: the engine's event.
        raw: new text as the model wrote it.
        parts: new text, reasoning and calls.
        logprobs: those of the step's tokens, if requested.
        finish: set in the last step.
    """

    choice: int
    event: Event
    raw: str
    parts: list[Part]
    logprobs: list[TokenLogprob] | None
    finish: Finish | None

    @classmethod
    def merged(cls, steps: Sequence[StepOutput]) -> StepOutput:
        """All steps of an answer as one."""
        last, raw = steps[-1], "".join(step.raw for step in steps)
        parts = merge_texts([part for step in steps for part in step.parts])
        tokens = [token for step in steps for token in step.logprobs or ()]
        logprobs = None if last.logprobs is None else tokens
        return replace(last, raw=raw, parts=parts, logprobs=logprobs)

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ended; None before its end."""
        return self.finish.reason if self.finish else None
