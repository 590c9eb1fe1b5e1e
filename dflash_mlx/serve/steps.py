"""The answers to a request while they are generated, step by step, in the words of no API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..answers.parser import AnswerParser, Part
from ..answers.thoughts import ThoughtCounter
from ..events import Event
from ..stream import text_of
from .errors import RequestError, from_library, shutting_down
from .logprobs import LogprobRecorder
from .metrics import Metrics
from .request import GenerationRequest

if TYPE_CHECKING:
    from ..engine.job import Job

FinishReason = Literal["stop", "length", "tool_calls"]

log = logging.getLogger("dflash_mlx.serve")


@dataclass(frozen=True)
class StepOutput:
    """What one decode step added to an answer.

    Attributes:
        choice: the index of the answer among all of the request.
        event: the engine's event, with the text as the model wrote it.
        parts: new text, reasoning and calls.
        logprobs: those of the step's tokens, as `LogprobRecorder` has them; None if nobody asked.
        reason: why the answer ended; None before its last step. The others are of that step.
        reasoning_tokens: tokens of the answer's thoughts and their markers.
        stop_string: the stop string that ended the answer.
    """

    choice: int
    event: Event
    parts: list[Part]
    logprobs: list[dict[str, Any]] | None = None
    reason: FinishReason | None = None
    reasoning_tokens: int = 0
    stop_string: str | None = None


@dataclass(frozen=True)
class Choice:
    """One of a request's answers: its job, and what reads the job's events.

    A model that does not think has no `counter`.
    """

    job: Job
    parser: AnswerParser
    recorder: LogprobRecorder | None
    counter: ThoughtCounter | None


class ResponseStream:
    """The answers to a request while they are generated.

    A task follows them, so that an answer whose client reads slowly, or not at all, ends when the
    engine has ended it, and holds nothing of the model then.

    Attributes:
        request: the request; of several prompts, the first one's.
        prompt_tokens: the length of all prompts.
        size: how many answers there are.
        ignored: what the request asks for and does not get.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt_tokens: int,
        choices: Sequence[Choice],
        ignored: Sequence[str],
        tokenizer: Any,
        metrics: Metrics,
        closed: Callable[[ResponseStream], None],
    ) -> None:
        self.request, self.prompt_tokens, self.size = request, prompt_tokens, len(choices)
        self.ignored = ignored
        self._tokenizer, self._metrics = tokenizer, metrics
        self._closed: Callable[[ResponseStream], None] | None = closed
        self._choices, self._start = choices, time.monotonic()
        self._steps: asyncio.Queue[StepOutput | RequestError | None] = asyncio.Queue()

    def start(self) -> None:
        """Follow the answers; in the event loop."""
        self._following: asyncio.Task[None] | None = asyncio.create_task(self._follow_all())
        self._following.add_done_callback(self._ended)

    async def steps(self) -> AsyncIterator[StepOutput]:
        """The steps of each answer in turn; the engine generates them at the same time.

        Raises `RequestError` if the engine fails or the server stops.
        """
        try:
            while (step := await self._steps.get()) is not None:
                if isinstance(step, RequestError):
                    raise step
                yield step
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what is not finished."""
        if self._closed is not None:
            for choice in self._choices:
                choice.job.cancel()
            self._closed(self)
            self._closed = None

    def _ended(self, following: asyncio.Task[None]) -> None:
        error = shutting_down() if following.cancelled() else following.exception()
        self._steps.put_nowait(None if error is None else request_error(error, self._metrics))
        self.close()
        self._choices, self._following = (), None

    async def _follow_all(self) -> None:
        for index, choice in enumerate(self._choices):
            await self._follow(index, choice)

    async def _follow(self, index: int, choice: Choice) -> None:
        metrics, last = self._metrics, self._start
        tokens: list[int] = []
        length = 0  # of the text
        async for event in choice.job:
            if self._closed is None:
                break
            now = time.monotonic()
            if index == 0:  # the others are read later than they come
                (metrics.step_gap if tokens else metrics.first_token).observe(now - last)
            last = now
            tokens += event.tokens
            length += len(event.text)
            metrics.count_step(event)
            parts = choice.parser.read(event)
            if choice.counter is not None:
                choice.counter.add(event.tokens)
            step = index, event, parts, self._logprobs(choice.recorder, event)
            if event.finish_reason is None:
                self._steps.put_nowait(StepOutput(*step))
                continue
            reason: FinishReason = "tool_calls" if choice.parser.calls else "stop"
            reason = "length" if event.finish_reason == "length" else reason
            stop_string = None if reason == "length" else self._stop_string(tokens, length)
            metrics.count_finish(event.stats, reason)
            thoughts = choice.counter.tokens if choice.counter is not None else 0
            self._steps.put_nowait(StepOutput(*step, reason, thoughts, stop_string))
            return
        raise shutting_down()

    def _logprobs(
        self, recorder: LogprobRecorder | None, event: Event
    ) -> list[dict[str, Any]] | None:
        """The log-probabilities of a step's tokens, without an EOS token."""
        if recorder is None:
            return None
        found, eos_ids = recorder.take(event.tokens), self._tokenizer.eos_token_ids
        pairs = zip(event.tokens, found, strict=True)
        return [one for token, one in pairs if token not in eos_ids]

    def _stop_string(self, tokens: Sequence[int], length: int) -> str | None:
        """The stop string that ended a text of this length; None if an EOS token did."""
        tokenizer = self._tokenizer
        stops = self.request.settings.get("stop") or ()
        if not stops or not tokens or tokens[-1] in tokenizer.eos_token_ids:
            return None
        text = text_of(tokenizer, tokens, self.request.continues_text)
        return min((stop for stop in stops if text.startswith(stop, length)), default=None)


def request_error(error: BaseException, metrics: Metrics) -> RequestError:
    """What the client gets for an error. A failure of ours is also logged and counted."""
    found = from_library(error)
    if found.status == 500:
        metrics.failed.inc()
        cause = error.__cause__ if str(found) == str(error) else error  # ours says all there is
        log.error("an answer could not be finished: %s", found, exc_info=cause)
    return found
