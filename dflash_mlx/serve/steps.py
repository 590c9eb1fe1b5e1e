"""The answers to a request while they are generated, step by step, independent of any API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..answers.parser import AnswerParser
from ..answers.parts import Part
from ..answers.thoughts import ThoughtCounter
from ..events import Event
from ..stream import decode_text
from .generation_request import GenerationRequest
from .http_errors import RequestError, from_library, shutting_down
from .logprobs import LogprobRecorder
from .metrics import Metrics

if TYPE_CHECKING:
    from ..engine.job import Job

FinishReason = Literal["stop", "length", "tool_calls"]

log = logging.getLogger("dflash_mlx.serve")


@dataclass(frozen=True)
class StepOutput:
    """What one decode step added to an answer.

    Attributes:
        choice: the index of the answer among all answers to the request.
        event: the engine's event, with the text as the model wrote it.
        parts: new text, reasoning and calls.
        logprobs: the step's tokens, described by `LogprobRecorder`; None if not requested.
        reason: why the answer ended; None before its last step.
        reasoning_tokens: in the last step, the tokens of the answer's thoughts and their markers.
        stop_string: in the last step, the stop string that ended the answer.
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
    """One of the answers to a request.

    Attributes:
        job: generates the answer.
        parser: splits its text into parts.
        recorder: has its log-probabilities; None if not requested.
        counter: counts its thoughts; None if the model does not think.
    """

    job: Job
    parser: AnswerParser
    recorder: LogprobRecorder | None
    counter: ThoughtCounter | None


class ResponseStream:
    """The answers to a request while they are generated.

    A task follows them. So an answer ends when the engine has ended it, even if the client reads
    slowly or not at all, and then keeps nothing of the model alive.

    Args:
        request: the request; the first one, if there are several prompts.
        prompt_tokens: the tokens of all prompts.
        choices: the answers.
        ignored: names of what the server ignores.
        tokenizer: the target's tokenizer.
        metrics: counts steps and answers.
        closed: called once, when the answers have ended.

    Attributes:
        request, prompt_tokens, ignored: the arguments.
        size: the number of answers.
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
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.size = len(choices)
        self.ignored = ignored
        self._choices = choices
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._closed: Callable[[ResponseStream], None] | None = closed
        self._start = time.monotonic()
        self._steps: asyncio.Queue[StepOutput | RequestError | None] = asyncio.Queue()

    def start(self) -> None:
        """Follow the answers. Call this in the event loop."""
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._follow_all())
        self._task.add_done_callback(self._ended)

    async def steps(self) -> AsyncIterator[StepOutput]:
        """Yield all steps of the first answer, then all of the second, and so on.

        The engine generates the answers at the same time.

        Raises `RequestError` if the engine fails or the server stops.
        """
        try:
            step = await self._steps.get()
            while step is not None:
                if isinstance(step, RequestError):
                    raise step
                yield step
                step = await self._steps.get()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel answers that are not finished."""
        if self._closed is not None:
            for choice in self._choices:
                choice.job.cancel()
            self._closed(self)
            self._closed = None

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the steps when the task has ended."""
        error = shutting_down() if task.cancelled() else task.exception()
        self._steps.put_nowait(None if error is None else request_error(error, self._metrics))
        self.close()
        self._choices = ()
        self._task = None

    async def _follow_all(self) -> None:
        for index, choice in enumerate(self._choices):
            await self._follow(index, choice)

    async def _follow(self, index: int, choice: Choice) -> None:
        """Turn the events of one answer into steps."""
        metrics = self._metrics
        last_time = self._start
        tokens: list[int] = []
        text_length = 0
        async for event in choice.job:
            if self._closed is None:
                break
            now = time.monotonic()
            if index == 0:  # the events of other answers have waited until this loop reads them
                histogram = metrics.step_gap if tokens else metrics.first_token
                histogram.observe(now - last_time)
            last_time = now
            tokens += event.tokens
            text_length += len(event.text)
            metrics.count_step(event)
            parts = choice.parser.read(event)
            if choice.counter is not None:
                choice.counter.add(event.tokens)
            step = StepOutput(
                choice=index,
                event=event,
                parts=parts,
                logprobs=self._logprobs(choice.recorder, event),
            )
            if event.finish_reason is None:
                self._steps.put_nowait(step)
                continue
            reason: FinishReason = "stop"
            stop_string = None
            if event.finish_reason == "length":
                reason = "length"
            else:
                reason = "tool_calls" if choice.parser.calls else "stop"
                stop_string = self._stop_string(tokens, text_length)
            metrics.count_finish(event.stats, reason)
            last_step = replace(
                step,
                reason=reason,
                reasoning_tokens=choice.counter.tokens if choice.counter is not None else 0,
                stop_string=stop_string,
            )
            self._steps.put_nowait(last_step)
            return
        raise shutting_down()

    def _logprobs(
        self, recorder: LogprobRecorder | None, event: Event
    ) -> list[dict[str, Any]] | None:
        """Return the log-probabilities of a step's tokens, except for an EOS token."""
        if recorder is None:
            return None
        eos_ids = self._tokenizer.eos_token_ids
        pairs = zip(event.tokens, recorder.take(event.tokens), strict=True)
        return [logprob for token, logprob in pairs if token not in eos_ids]

    def _stop_string(self, tokens: Sequence[int], length: int) -> str | None:
        """Return the stop string that ended a text of this length; None if an EOS token did."""
        tokenizer = self._tokenizer
        stops = self.request.settings.get("stop") or ()
        if not stops or not tokens or tokens[-1] in tokenizer.eos_token_ids:
            return None
        text = decode_text(tokenizer, tokens, self.request.continues_text)
        # The text ends where the stop string begins. Of several, the shortest came first.
        return min((stop for stop in stops if text.startswith(stop, length)), default=None)


def request_error(error: BaseException, metrics: Metrics) -> RequestError:
    """Make the error that the client gets. Internal errors are logged and counted."""
    client_error = from_library(error)
    if client_error.status == 500:
        metrics.failed.inc()
        # Our own errors already say everything, so log only their cause.
        is_ours = str(client_error) == str(error)
        cause = error.__cause__ if is_ours else error
        log.error("an answer could not be finished: %s", client_error, exc_info=cause)
    return client_error
