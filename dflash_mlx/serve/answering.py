"""Answers while they are made: what each round of a request's jobs adds to them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ..errors import DFlashError
from ..events import Event, Stats
from ..stream import text_of
from ..validation import ErrorWrapper
from . import harmony
from .ask import Ask
from .errors import RETRY_SECONDS, Refusal
from .harmony import HarmonySplitter
from .logprobs import Recorder, TokenLogprob
from .metrics import Metrics
from .parts import Part, Splitter
from .template import Encoded
from .tools import Syntax

if TYPE_CHECKING:
    from ..targets import Target

Reason = Literal["stop", "length", "tool_calls"]


class Job(Protocol):
    """A request that an engine works on."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Its events."""

    def cancel(self) -> None:
        """End it, if it has not ended."""


class Keeper(Protocol):
    """What of a desk its answers need.

    Attributes:
        target: whose answers they are.
        syntax: of its calls.
        metrics: counted here.
    """

    target: Target
    syntax: Syntax
    metrics: Metrics

    def refused(self, error: DFlashError) -> Refusal:
        """What a client is told of an error."""

    def close(self, answering: Answering, jobs: int) -> None:
        """These answers are over, of so many jobs."""


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

    def __init__(self, desk: Keeper, ask: Ask, encoded: Encoded, jobs: Sequence[Open]) -> None:
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
        events = aiter(one.job)
        while (event := await self._next(events)) is not None:
            now = time.monotonic()
            (metrics.gap if tokens else metrics.first_token).observe(now - last)
            last = now
            tokens += event.tokens
            metrics.count_round(event)
            parts = one.splitter.feed(event.text)
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
                self._told(one.recorder, event),
                end,
            )
            if end is not None:
                return
        raise Refusal("The server is shutting down.", 503, retry_after=RETRY_SECONDS)

    async def _next(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event; None when there is none, or nobody waits for it any more.

        Raises `DFlashError` for whatever went wrong in the engine.
        """
        with ErrorWrapper(DFlashError, "The answer could not be finished"):
            event = await anext(events, None)
        return event if self._open else None

    def _end(self, event: Event, splitter: Splitter | HarmonySplitter, tokens: list[int]) -> End:
        reason: Reason = "length" if event.finish_reason == "length" else "stop"
        if splitter.calls and reason == "stop":
            reason = "tool_calls"
        stop = self._stop_string(tokens) if event.finish_reason == "stop" else None
        return End(reason, event.stats, self._reasoning(tokens), stop)

    def _told(self, recorder: Recorder | None, event: Event) -> list[TokenLogprob] | None:
        """The log-probabilities of a round's tokens, but for one that ends the text."""
        if recorder is None:
            return None
        ends = self._desk.target.tokenizer.eos_token_ids
        return [one for one in recorder.take(event.tokens) if one.chosen.token not in ends]

    def _reasoning(self, tokens: Sequence[int]) -> int:
        """How many tokens of an answer are the model's reasoning, its markers among them."""
        tokenizer = self._desk.target.tokenizer
        if self._desk.syntax.name == harmony.NAME:
            return harmony.reasoning_tokens(tokens, tokenizer)
        if not tokenizer.has_thinking:
            return 0
        start = 0 if self._thinking else _find(tokens, tokenizer.think_start_tokens)
        if start is None:
            return 0
        end = _find(tokens, tokenizer.think_end_tokens)
        return (len(tokens) if end is None else end + len(tokenizer.think_end_tokens)) - start

    def _stop_string(self, tokens: Sequence[int]) -> str | None:
        """The stop string that ended an answer; None if its last token did."""
        tokenizer = self._desk.target.tokenizer
        stops = self.ask.settings.get("stop") or ()
        if not stops or not tokens or tokens[-1] in tokenizer.eos_token_ids:
            return None
        text = text_of(tokenizer, tokens, self.ask.goes_on)
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        return min(found)[1] if found else None


def _find(tokens: Sequence[int], marker: Sequence[int]) -> int | None:
    """Where a marker begins among tokens."""
    width = len(marker)
    places = range(len(tokens) - width + 1)
    return next((at for at in places if tuple(tokens[at : at + width]) == tuple(marker)), None)
