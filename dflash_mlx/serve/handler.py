"""From requests to jobs of the engine.

Nothing here blocks the event loop. Worker threads render templates, compile grammars and submit
jobs; the engine decodes in a thread of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ..answers.families import AnswerFormat
from ..answers.parser import AnswerParser
from ..answers.thoughts import ThoughtCounter
from ..chat_template import SWITCHES, template_reads, thinking_switches
from ..errors import DFlashError
from ..prompt import EFFORT
from ..stream import Detokenizer, skip_text_start
from ..threads import clean_up_at_end
from .errors import RETRY_SECONDS, RequestError, shutting_down
from .fields import SEEDS
from .grammar import GrammarFactory
from .logprobs import LogprobRecorder
from .metrics import Metrics
from .request import GenerationRequest
from .steps import Choice, ResponseStream, request_error
from .template import EncodedPrompt, encode

if TYPE_CHECKING:
    from ..engine.engine import Engine, EngineLoad
    from ..targets import Target

WORKERS: Final = 4  # compiling a grammar may take one of them a second


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
        idle: set while no request runs or waits.
        lost: machines that share the model have lost each other; no request is accepted.
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
        self.form = AnswerFormat.of(target.tokenizer)
        self.lost = False
        self._engine, self._defaults, self._capacity = engine, dict(defaults), capacity
        self._template = self._defaults.pop("chat_template_kwargs", None) or {}
        self._grammars = GrammarFactory(target, self.form)
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
        return (await loop.run_in_executor(self._workers, encode, *of)).ids

    async def start(self, requests: Sequence[GenerationRequest], salt: str = "") -> ResponseStream:
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
        loop, stream = asyncio.get_running_loop(), None
        try:
            stream = await loop.run_in_executor(self._workers, self._start, requests, salt)
        except DFlashError as error:
            raise request_error(error, self.metrics) from error
        finally:
            if stream is None:
                self._release(count)
        stream.start()
        self._streams.add(stream)
        if self._aborted:
            self.abort()
        return stream

    def _closed(self, stream: ResponseStream) -> None:
        self._streams.discard(stream)
        self._release(stream.size)

    def abort(self) -> None:
        """End all answers now, and those that start later."""
        self._aborted = True
        for stream in list(self._streams):
            stream.close()

    def give_up(self, error: DFlashError) -> None:
        """End all answers with an error: machines that share the model have lost each other."""
        self.lost = True
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
        if self.lost:
            raise shutting_down()
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

    def _start(self, requests: Sequence[GenerationRequest], salt: str) -> ResponseStream:
        """Submit the jobs of all requests, or cancel them if one fails."""
        tokens, choices, ignored = 0, list[Choice](), dict[str, None]()
        with ExitStack() as unless_all:
            for request in requests:
                request, dropped = self._with_template(request)
                prompt = encode(self.target, self.form, request)
                tokens += len(prompt.ids)
                settings = self._defaults | dict(request.settings) | {"branches": prompt.branches}
                if settings.get("repetition_penalty", 1) == 1:  # apps send the size with any other
                    settings.pop("repetition_context_size", None)
                settings |= {"salt": salt} if salt else {}
                for choice in self._choices(request, prompt, settings, dropped):
                    unless_all.callback(choice.job.cancel)
                    choices.append(choice)
                ignored |= dict.fromkeys(dropped)
            unless_all.pop_all()
        of = self.target.tokenizer, self.metrics, self._closed
        return ResponseStream(requests[0], tokens, choices, list(ignored), *of)

    def _choices(
        self,
        request: GenerationRequest,
        prompt: EncodedPrompt,
        settings: dict[str, Any],
        ignored: list[str],
    ) -> Iterator[Choice]:
        """Submit a job for each answer to a prompt. What the answers lack is added to `ignored`."""
        grammars = self._grammars.make(request, prompt.thinks_first, prompt.begun)
        ignored += grammars[0].warnings if grammars[0] else ()
        if request.schema is not None and request.tool_choice == "auto" and request.tools:
            if not self._grammars.may_call_beside_schema:
                ignored.append("tools beside a response format")
        if request.continues_text:
            settings["continues"] = True
        splits = self.form.thought[0] or request.callable_tools
        seed = settings.get("seed")
        for index, grammar in enumerate(grammars):
            if seed is not None:
                settings["seed"] = (seed + index) % SEEDS
            recorder = None
            if request.top_logprobs is not None:
                recorder = LogprobRecorder(self.target.tokenizer, request.top_logprobs)
            if processors := [one for one in (recorder, grammar) if one is not None]:
                settings["logits_processors"] = processors
            if "stop" in settings and splits and not request.is_raw:
                settings["stop_applies"] = self._parser(request, prompt).answer_length
            job = self._engine.submit(prompt.ids, **settings)
            counter = None
            if self.form.thought[0]:
                counter = ThoughtCounter(self._parser(request, prompt), self._detokenizer(request))
            yield Choice(job, self._parser(request, prompt), recorder, counter)

    def _with_template(self, request: GenerationRequest) -> tuple[GenerationRequest, list[str]]:
        """A request with all variables of the chat template, and what is ignored of it.

        A switch for thinking has the name that the template reads, whatever a client calls it.
        """
        tokenizer, ignored = self.target.tokenizer, [*request.ignored, *request.left_out]
        asked = dict(request.template_settings)
        wanted = [asked.pop(name) for name in SWITCHES if name in asked]
        switches = thinking_switches(tokenizer, wanted[0]) if wanted else {}
        if wanted and not switches and bool(wanted[0]) != bool(self.form.thought[0]):
            ignored.append("thinking")
        elif EFFORT in asked and not template_reads(tokenizer, EFFORT):
            ignored.append(EFFORT)
        template = {**self._template, **asked, **switches}
        return replace(request, template_settings=template), ignored

    def _detokenizer(self, request: GenerationRequest) -> Detokenizer:
        detokenizer = Detokenizer(self.target.tokenizer)
        if request.continues_text:
            skip_text_start(detokenizer, self.target.tokenizer)
        return detokenizer

    def _parser(self, request: GenerationRequest, prompt: EncodedPrompt) -> AnswerParser:
        schemas = {tool.name: tool.parameters for tool in request.callable_tools}
        parser = AnswerParser(
            self.form,
            schemas,
            prompt.thinks_first,
            request.parallel_calls,
            self._detokenizer(request),
            forced=request.tool_choice == "required",
        )
        parser.begin(prompt.begun)
        return parser
