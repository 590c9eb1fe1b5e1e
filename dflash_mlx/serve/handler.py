"""From requests to jobs of the engine, and from a job's events to pieces of an answer.

Nothing here blocks the event loop. Worker threads render templates, compile grammars and submit
jobs; the engine decodes in a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..answers.families import AnswerFormat
from ..answers.parser import AnswerParser, Reasoning, joined
from ..chat_template import SWITCHES, template_reads, thinking_switches
from ..errors import DFlashError
from ..events import Event
from ..prompt import EFFORT
from ..stream import skip_text_start, text_of
from ..threads import clean_up_at_end
from ..validation import ErrorWrapper
from .errors import RETRY_SECONDS, RequestError, from_library
from .grammar import GrammarFactory
from .logprobs import LogprobRecorder, TokenLogprob, Vocabulary
from .metrics import Metrics
from .request import GenerationRequest
from .steps import Finish, FinishReason, StepOutput
from .template import encode

if TYPE_CHECKING:
    from ..engine.engine import Engine, EngineLoad
    from ..engine.job import Job
    from ..targets import Target

WORKERS: Final = 4  # compiling a grammar may take one of them a second

log = logging.getLogger("dflash_mlx.serve")


@dataclass(frozen=True)
class Choice:
    """One of a request's answers: its job, and what reads the job's events."""

    job: Job
    parser: AnswerParser
    recorder: LogprobRecorder | None


class ResponseStream:
    """The answers to one request while they are generated.

    A task follows them, so that an answer whose client reads slowly, or not at all, ends when the
    engine has ended it, and holds nothing of the model then.

    Attributes:
        request: the request.
        prompt_tokens: the length of its prompt.
        ignored: what the request asks for and does not get.
    """

    def __init__(
        self,
        handler: RequestHandler,
        request: GenerationRequest,
        prompt_tokens: int,
        choices: Sequence[Choice],
        ignored: Sequence[str],
    ) -> None:
        self.ignored = ignored
        self.request, self.prompt_tokens = request, prompt_tokens
        self._tokenizer, self._metrics = handler.target.tokenizer, handler.metrics
        self._closed: Callable[[ResponseStream], None] = handler.closed
        self._choices, self._open = choices, True
        self._start = time.monotonic()
        self._steps: asyncio.Queue[StepOutput | RequestError | None] = asyncio.Queue()

    def start(self) -> None:
        """Follow the answers; in the event loop."""
        self._following = asyncio.create_task(self._follow_all())

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
        if self._open:
            self._open = False
            for choice in self._choices:
                choice.job.cancel()
            self._closed(self)

    async def _follow_all(self) -> None:
        last = None
        try:
            for index, choice in enumerate(self._choices):
                async for step in self._follow(index, choice):
                    self._steps.put_nowait(step)
        except DFlashError as error:
            last = request_error(error, self._metrics)
        finally:
            self._steps.put_nowait(last)
            self.close()
            self._choices, self._closed = (), lambda stream: None

    async def _follow(self, index: int, choice: Choice) -> AsyncIterator[StepOutput]:
        metrics, last = self._metrics, self._start
        tokens: list[int] = []
        reasoning, length = "", 0  # of the text
        events = aiter(choice.job)
        while (event := await self._next(events)) is not None:
            now = time.monotonic()
            if index == 0:  # the others are read later than they come
                (metrics.step_gap if tokens else metrics.first_token).observe(now - last)
            last = now
            tokens += event.tokens
            length += len(event.text)
            metrics.count_step(event)
            parts, finish = choice.parser.read(event), None
            reasoning += joined(parts, Reasoning)
            if event.finish_reason is not None:
                finish = self._finish(event, tokens, length, reasoning, bool(choice.parser.calls))
                metrics.count_finish(event.stats, finish.reason)
            logprobs = self._logprobs(choice.recorder, event)
            yield StepOutput(index, event, event.text, parts, logprobs, finish)
            if finish is not None:
                return
        raise RequestError("The server is shutting down.", 503, retry_after=RETRY_SECONDS)

    async def _next(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event, or None after `close`. Raises `DFlashError` for all engine failures."""
        with ErrorWrapper(DFlashError, "The answer could not be finished"):
            event = await anext(events, None)
        return event if self._open else None

    def _finish(
        self, event: Event, tokens: Sequence[int], length: int, reasoning: str, has_calls: bool
    ) -> Finish:
        count = len(self._tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        if event.finish_reason == "length":
            return Finish("length", event.stats, count)
        reason: FinishReason = "tool_calls" if has_calls else "stop"
        return Finish(reason, event.stats, count, self._stop_string(tokens, length))

    def _logprobs(
        self, recorder: LogprobRecorder | None, event: Event
    ) -> list[TokenLogprob] | None:
        """The log-probabilities of a step's tokens, without an EOS token."""
        if recorder is None:
            return None
        eos_ids = self._tokenizer.eos_token_ids
        return [one for one in recorder.take(event.tokens) if one.chosen.token not in eos_ids]

    def _stop_string(self, tokens: Sequence[int], length: int) -> str | None:
        """The stop string that ended a text of this length; None if an EOS token did."""
        tokenizer = self._tokenizer
        stops = self.request.settings.get("stop") or ()
        if not stops or not tokens or tokens[-1] in tokenizer.eos_token_ids:
            return None
        text = text_of(tokenizer, tokens, self.request.continues_text)
        return min((stop for stop in stops if text.startswith(stop, length)), default=None)


def request_error(error: DFlashError, metrics: Metrics) -> RequestError:
    """What the client gets for an error. A failure of ours is also logged and counted."""
    found = from_library(error)
    if found.status == 500:
        metrics.failed.inc()
        log.error("an answer could not be finished: %s", error, exc_info=error.__cause__)
    return found


class RequestHandler:
    """Accepts requests up to a limit, and follows their jobs.

    Args:
        target: the model that answers.
        engine: generates the answers.
        defaults: settings of requests that do not name them.
        capacity: how many answers may run or wait at once.
        metrics: counts them.

    Attributes:
        form: how the model answers.
        draining: the server stops, and accepts no requests.
        idle: set while no request runs or waits.
        lost: machines that share the model have lost each other.
    """

    def __init__(
        self,
        target: Target,
        engine: Engine,
        defaults: Mapping[str, Any],
        capacity: int,
        metrics: Metrics,
    ) -> None:
        self.target, self.metrics = target, metrics
        tokenizer = target.tokenizer
        self.form = AnswerFormat.of(tokenizer)
        self.draining = self.lost = False
        self._engine, self._defaults, self._capacity = engine, dict(defaults), capacity
        self._template = self._defaults.pop("chat_template_kwargs", None) or {}
        self._grammars = GrammarFactory(target, self.form)
        self._vocabulary = Vocabulary(tokenizer)
        self._workers = ThreadPoolExecutor(WORKERS, "dflash-serve", clean_up_at_end)
        self._streams: set[ResponseStream] = set()
        self._reserved, self._busy_since, self._aborted = 0, 0.0, False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def busy(self) -> bool:
        """Whether a client waits for an answer."""
        return bool(self._streams)

    @property
    def load(self) -> EngineLoad:
        """The engine's."""
        return self._engine.load

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the engine's last step; 0 while it has nothing to do.

        Cancelled jobs count as long as the engine has them: the device may hang with them.
        """
        if not (self.busy or self._engine.busy):
            return 0.0
        return time.monotonic() - max(self._busy_since, self._engine.progressed)

    async def encode(self, request: GenerationRequest) -> list[int]:
        """The token ids of a request's prompt. Raises `RequestError`."""
        loop = asyncio.get_running_loop()
        request, _ = self._with_template(request)
        of = self.target, self.form, request
        ids, _ = await loop.run_in_executor(self._workers, encode, *of)
        return ids

    async def start(
        self, requests: Sequence[GenerationRequest], salt: str = ""
    ) -> list[ResponseStream]:
        """Start to answer all of these requests, or none.

        Args:
            requests: one, or one for each prompt.
            salt: separates the prefix caches of users.

        Raises `RequestError`: 400 for what the engine refuses, 429 if the queue is full, 503 if the
        server stops.
        """
        count = sum(request.n for request in requests)
        self._reserve(count)
        if not (self.busy or self._engine.busy):
            self._busy_since = time.monotonic()
        loop, streams = asyncio.get_running_loop(), list[ResponseStream]()
        try:
            streams = await loop.run_in_executor(self._workers, self._start, requests, salt)
        except DFlashError as error:
            raise request_error(error, self.metrics) from error
        finally:
            if not streams:
                self._release(count)
        for stream in streams:
            stream.start()
        self._streams.update(streams)
        if self._aborted:
            self.abort()
        return streams

    def closed(self, stream: ResponseStream) -> None:
        """A `ResponseStream` has ended."""
        self._streams.discard(stream)
        self._release(stream.request.n)

    def abort(self) -> None:
        """End all answers now, and those that start later."""
        self._aborted = True
        for stream in list(self._streams):
            stream.close()

    def give_up(self, error: DFlashError) -> None:
        """End all answers with an error: machines that share the model have lost each other."""
        self.draining = self.lost = True
        self._engine.abandon(error)

    def close(self) -> None:
        """End the engine and the worker threads; from any thread, when no request is left."""
        self._engine.close()
        self._workers.shutdown(wait=False)

    def _reserve(self, count: int) -> None:
        if count > self._capacity:  # waiting would not help
            raise RequestError(
                f"This server takes {self._capacity} answers at most, not {count}: ask for fewer."
            )
        if self.draining:
            raise RequestError("The server is shutting down.", 503, retry_after=RETRY_SECONDS)
        if self._reserved + count > self._capacity:
            raise RequestError(
                f"The queue is full ({self._capacity} answers): try again later.",
                429,
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        self._reserved += count
        self.idle.clear()
        self.metrics.open.inc(count)

    def _release(self, count: int) -> None:
        self._reserved -= count
        if not self._reserved:
            self.idle.set()
        self.metrics.open.dec(count)

    # These run in a worker thread.

    def _start(self, requests: Sequence[GenerationRequest], salt: str) -> list[ResponseStream]:
        with ExitStack() as unless_all:
            streams = [self._start_one(request, salt, unless_all) for request in requests]
            unless_all.pop_all()
        return streams

    def _start_one(
        self, request: GenerationRequest, salt: str, unless_all: ExitStack
    ) -> ResponseStream:
        """Submit a request's jobs. `unless_all` cancels them if another one fails."""
        request, ignored = self._with_template(request)
        ids, branches = encode(self.target, self.form, request)
        thinks_first = self.form.starts_in_thought(self.target.tokenizer, ids)
        grammars = self._grammars.make(request, thinks_first)
        settings = self._defaults | dict(request.settings) | {"branches": branches}
        if salt:
            settings["salt"] = salt
        if request.continues_text:
            settings["continues"] = True
        seed, choices = settings.get("seed"), []
        for index, grammar in enumerate(grammars):
            if seed is not None:
                settings["seed"] = (seed + index) % 2**32
            recorder = None
            if request.top_logprobs is not None:
                recorder = LogprobRecorder(self._vocabulary, request.top_logprobs)
            processors = [one for one in (recorder, grammar) if one is not None]
            if processors:
                settings["logits_processors"] = processors
            splits = self.form.thought[0] or request.callable_tools
            if "stop" in settings and splits and request.prompt_field != "prompt":
                settings["stop_applies"] = self._parser(request, thinks_first).answer_length
            job = self._engine.submit(ids, **settings)
            unless_all.callback(job.cancel)
            choices.append(Choice(job, self._parser(request, thinks_first), recorder))
        ignored += grammars[0].warnings if grammars[0] else ()
        if request.schema is not None and request.tool_choice == "auto" and request.tools:
            if not self._grammars.may_call_beside_schema:
                ignored.append("tools beside a response format")
        return ResponseStream(self, request, len(ids), choices, ignored)

    def _with_template(self, request: GenerationRequest) -> tuple[GenerationRequest, list[str]]:
        """A request with all variables of the chat template, and what is ignored of it.

        A switch for thinking has the name that the template reads, whatever a client calls it.
        """
        tokenizer, ignored = self.target.tokenizer, list(request.ignored)
        asked = dict(request.template_settings)
        wanted = [asked.pop(name) for name in SWITCHES if name in asked]
        switches = thinking_switches(tokenizer, wanted[0]) if wanted else {}
        if wanted and not switches and bool(wanted[0]) != bool(self.form.thought[0]):
            ignored.append("thinking")
        elif EFFORT in asked and not template_reads(tokenizer, EFFORT):
            ignored.append(EFFORT)
        template = {**self._template, **asked, **switches}
        return replace(request, template_settings=template), ignored

    def _parser(self, request: GenerationRequest, thinks_first: bool) -> AnswerParser:
        tokenizer = self.target.tokenizer
        detokenizer = tokenizer.detokenizer
        if request.continues_text:
            skip_text_start(detokenizer, tokenizer)
        schemas = {tool.name: tool.parameters for tool in request.callable_tools}
        parallel = request.parallel_calls
        return AnswerParser(self.form, schemas, thinks_first, parallel, detokenizer)
