"""Answers while they are made: what each round of a request's jobs adds to them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ..errors import DFlashError
from ..events import Event, Stats
from ..foreign import Foreign
from .ask import Ask
from .errors import RETRY_SECONDS, Refusal
from .harmony import HarmonySplitter
from .logprobs import Recorder, TokenLogprob
from .parts import Part, Splitter, first_spaces
from .template import Encoded

if TYPE_CHECKING:
    from .desk import Desk

Reason = Literal["stop", "length", "tool_calls"]


class Job(Protocol):
    """A request that an engine works on."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Its events."""

    def cancel(self) -> None:
        """End it, if it has not ended."""


@dataclass(frozen=True)
class End:
    """Why an answer ended, and what it took."""

    reason: Reason
    stats: Stats
    reasoning_tokens: int
    stop: str | None = None  # the stop string that did


@dataclass(frozen=True)
class Step:
    """What a round added to one of the answers.

    Attributes:
        choice: which answer, from 0 on.
        parts: what has become certain.
        tokens, accepted, drafted: how many the round brought, kept and tried.
        logprobs: of its tokens, if asked for.
        end: of the last step.
    """

    choice: int
    parts: list[Part]
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    logprobs: list[TokenLogprob] | None = None
    end: End | None = None


@dataclass(frozen=True)
class Open:
    """A job that is under way, and what its events are read with."""

    job: Job
    splitter: Splitter | HarmonySplitter
    recorder: Recorder | None


class Answering:
    """The answers to one request, while they are made.

    Attributes:
        ask: the request.
        prompt_tokens: of its prompt.
    """

    def __init__(self, desk: Desk, ask: Ask, encoded: Encoded, jobs: Sequence[Open]) -> None:
        self.ask, self.prompt_tokens = ask, len(encoded.ids)
        self._desk, self._thinking, self._jobs = desk, encoded.thinking, jobs
        self._open = True
        self._asked = time.monotonic()

    async def steps(self) -> AsyncIterator[Step]:
        """Round after round, one answer after the other; they are made at the same time.

        Raises `Refusal` when the engine gives up, or the server ends.
        """
        try:
            for choice, one in enumerate(self._jobs):
                async for step in self._follow(choice, one):
                    yield step
        except DFlashError as error:
            raise self._desk.refused(error) from error
        finally:
            self.leave()

    def leave(self) -> None:
        """Nobody waits for the rest."""
        if self._open:
            self._open = False
            for one in self._jobs:
                one.job.cancel()
            self._desk.close(self, len(self._jobs))

    async def _follow(self, choice: int, one: Open) -> AsyncIterator[Step]:
        metrics, last = self._desk.metrics, self._asked
        tokens: list[int] = []
        first = self.ask.goes_on  # whether its text is still to begin
        events = aiter(one.job)
        while (event := await self._next(events)) is not None:
            now = time.monotonic()
            (metrics.gap if tokens else metrics.first_token).observe(now - last)
            last = now
            tokens += event.tokens
            metrics.count_round(event)
            text = event.text
            if first and (text or event.finish_reason is not None):
                text, first = first_spaces(self._desk.target.tokenizer, tokens, text), False
            parts = one.splitter.feed(text)
            end = None
            if event.finish_reason is not None:
                parts += one.splitter.finish(cut=event.finish_reason == "length")
                end = self._end(event, one.splitter, tokens)
                metrics.count_end(event.stats, end.reason)
            yield Step(
                choice,
                parts,
                len(event.tokens),
                event.accepted,
                event.drafted,
                self._desk.tell(one.recorder, event),
                end,
            )
            if end is not None:
                return
        raise Refusal("The server is shutting down.", 503, retry_after=RETRY_SECONDS)

    async def _next(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event; None when there is none, or nobody waits for it any more.

        Raises `DFlashError` for whatever went wrong in the engine.
        """
        with Foreign(DFlashError, "The answer could not be finished"):
            event = await anext(events, None)
        return event if self._open else None

    def _end(self, event: Event, splitter: Splitter | HarmonySplitter, tokens: list[int]) -> End:
        reason: Reason = "length" if event.finish_reason == "length" else "stop"
        if splitter.calls and reason == "stop":
            reason = "tool_calls"
        stop = self._desk.stop_string(tokens, self.ask) if event.finish_reason == "stop" else None
        return End(reason, event.stats, self._desk.reasoning(tokens, self._thinking), stop)
