"""Turns requests into jobs of the engine.

Nothing here blocks the event loop. Worker threads render templates, compile grammars and submit
jobs. The engine decodes in its own thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..answers.families import AnswerFormat
from ..answers.parser import AnswerParser
from ..answers.thoughts import ThoughtCounter
from ..chat_template import SWITCHES, template_reads, thinking_switches
from ..errors import DFlashError
from ..prompt import EFFORT
from ..stream import Detokenizer, skip_text_start
from ..structured import Grammar
from ..threads import clean_up_at_end
from .fields import SEEDS
from .generation_request import GenerationRequest
from .grammar import GrammarFactory
from .http_errors import RETRY_SECONDS, RequestError, shutting_down
from .logprobs import LogprobRecorder
from .metrics import Metrics
from .steps import Choice, ResponseStream, request_error
from .template import EncodedPrompt, encode

if TYPE_CHECKING:
    from ..engine.engine import Engine, EngineLoad
    from ..targets import Target

WORKERS: Final = 4  # threads; compiling a grammar may block one of them for a second


class RequestHandler:
    """Accepts requests up to a limit, and follows their jobs.

    Args:
        target: the model that answers.
        engine: generates the answers.
        defaults: settings for requests that do not name them.
        capacity: how many answers may run or wait at once.
        metrics: counts the answers.

    Attributes:
        target, metrics: the arguments.
        form: how the model answers.
        idle: an event that is set while no request runs or waits.
        lost: whether machines that share the model have lost each other. If so, requests are
            refused.
    """

    def __init__(
        self,
        target: Target,
        engine: Engine,
        defaults: Mapping[str, Any],
        capacity: int,
        metrics: Metrics,
    ) -> None:
        self.target = target
        self.metrics = metrics
        self.form = AnswerFormat.of(target.tokenizer)
        self.lost = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._engine = engine
        self._defaults = dict(defaults)
        self._template = self._defaults.pop("chat_template_kwargs", None) or {}
        self._capacity = capacity
        self._grammars = GrammarFactory(target, self.form)
        self._workers = ThreadPoolExecutor(WORKERS, "dflash-serve", clean_up_at_end)
        self._streams: set[ResponseStream] = set()
        self._reserved = 0  # answers that run or wait
        self._busy_since = 0.0
        self._is_aborted = False

    @property
    def busy(self) -> bool:
        """Whether a client waits for an answer."""
        return bool(self._streams)

    @property
    def load(self) -> EngineLoad:
        """The load of the engine."""
        return self._engine.load

    @property
    def seconds_since_step(self) -> float:
        """Seconds since the engine's last step; 0 while it has no work.

        Cancelled jobs count until the engine has removed them, because the device may hang.
        """
        if not (self.busy or self._engine.busy):
            return 0.0
        return time.monotonic() - max(self._busy_since, self._engine.progressed)

    async def encode(self, request: GenerationRequest) -> list[int]:
        """Convert a request's prompt to token ids. Raises `RequestError`."""
        loop = asyncio.get_running_loop()
        request, _ = self._with_template(request)
        encode_request = partial(encode, self.target, self.form, request)
        prompt = await loop.run_in_executor(self._workers, encode_request)
        return prompt.ids

    async def start(self, requests: Sequence[GenerationRequest], salt: str = "") -> ResponseStream:
        """Start to answer all of these requests, or none.

        Args:
            requests: one request, or one for each prompt.
            salt: separates the prefix caches of users.

        Raises `RequestError`: 400 if the engine refuses a request, 429 if the queue is full, 503 if
        the server stops.
        """
        count = sum(request.n for request in requests)
        self._reserve(count)
        if not (self.busy or self._engine.busy):
            self._busy_since = time.monotonic()
        loop = asyncio.get_running_loop()
        stream = None
        try:
            stream = await loop.run_in_executor(self._workers, self._start, requests, salt)
        except DFlashError as error:
            raise request_error(error, self.metrics) from error
        finally:
            if stream is None:
                self._release(count)
        stream.start()
        self._streams.add(stream)
        if self._is_aborted:
            self.abort()
        return stream

    def _closed(self, stream: ResponseStream) -> None:
        self._streams.discard(stream)
        self._release(stream.size)

    def abort(self) -> None:
        """End all answers, and those that start later."""
        self._is_aborted = True
        for stream in list(self._streams):
            stream.close()

    def give_up(self, error: DFlashError) -> None:
        """End all answers with an error, because machines that share the model lost each other."""
        self.lost = True
        self._engine.abandon(error)

    def close(self) -> None:
        """End the engine and the worker threads. No request may be open.

        This may be called from any thread.
        """
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

    # The following methods run in a worker thread.

    def _start(self, requests: Sequence[GenerationRequest], salt: str) -> ResponseStream:
        """Submit the jobs of all requests. If one fails, cancel the others."""
        prompt_tokens = 0
        choices: list[Choice] = []
        ignored: dict[str, None] = {}  # a set that keeps its order
        with ExitStack() as on_failure:
            for request in requests:
                request, ignored_in_request = self._with_template(request)
                prompt = encode(self.target, self.form, request)
                prompt_tokens += len(prompt.ids)
                grammars = self._grammars.make(request, prompt.thinks_first, prompt.begun)
                ignored_in_request += self._ignored_by_grammar(request, grammars)
                ignored |= dict.fromkeys(ignored_in_request)
                settings = self._settings(request, prompt, salt)
                for choice in self._choices(request, prompt, grammars=grammars, settings=settings):
                    on_failure.callback(choice.job.cancel)
                    choices.append(choice)
            on_failure.pop_all()
        return ResponseStream(
            requests[0],
            prompt_tokens=prompt_tokens,
            choices=choices,
            ignored=list(ignored),
            tokenizer=self.target.tokenizer,
            metrics=self.metrics,
            closed=self._closed,
        )

    def _settings(
        self, request: GenerationRequest, prompt: EncodedPrompt, salt: str
    ) -> dict[str, Any]:
        """Return the settings that all answers to a prompt share."""
        settings = self._defaults | dict(request.settings)
        settings["branches"] = prompt.branches
        if settings.get("repetition_penalty", 1) == 1:  # apps send the size even without a penalty
            settings.pop("repetition_context_size", None)
        if salt:
            settings["salt"] = salt
        if request.continues_text:
            settings["continues"] = True
        return settings

    def _ignored_by_grammar(
        self, request: GenerationRequest, grammars: Sequence[Grammar | None]
    ) -> list[str]:
        """Return names of what the grammars of a request do not enforce or allow."""
        ignored = list(grammars[0].warnings) if grammars[0] else []
        if request.schema is not None and request.tool_choice == "auto" and request.tools:
            if not self._grammars.allows_calls_with_schema:
                ignored.append("tools beside a response format")
        return ignored

    def _choices(
        self,
        request: GenerationRequest,
        prompt: EncodedPrompt,
        grammars: Sequence[Grammar | None],
        settings: dict[str, Any],
    ) -> Iterator[Choice]:
        """Submit a job for each answer to a prompt."""
        has_parts = self.form.thinks or bool(request.callable_tools)
        seed = settings.get("seed")
        for index, grammar in enumerate(grammars):
            if seed is not None:
                settings["seed"] = (seed + index) % SEEDS
            recorder = None
            processors: list[Any] = []
            if request.top_logprobs is not None:
                recorder = LogprobRecorder(self.target.tokenizer, request.top_logprobs)
                processors.append(recorder)
            if grammar is not None:
                processors.append(grammar)
            if processors:
                settings["logits_processors"] = processors
            if "stop" in settings and has_parts and not request.is_raw:
                settings["stop_applies"] = self._parser(request, prompt).answer_length
            job = self._engine.submit(prompt.ids, **settings)
            counter = None
            if self.form.thinks:
                counter = ThoughtCounter(self._parser(request, prompt), self._detokenizer(request))
            yield Choice(
                job=job,
                parser=self._parser(request, prompt),
                recorder=recorder,
                counter=counter,
            )

    def _with_template(self, request: GenerationRequest) -> tuple[GenerationRequest, list[str]]:
        """Add all variables of the chat template to a request.

        Clients call the switch for thinking by several names. The template gets the one it reads.

        Returns the new request and the names of the fields that are ignored.
        """
        tokenizer = self.target.tokenizer
        ignored = [*request.ignored, *request.left_out]
        variables = dict(request.template_settings)
        requested = [variables.pop(name) for name in SWITCHES if name in variables]
        switches: dict[str, bool] = {}
        if requested:
            switches = thinking_switches(tokenizer, requested[0])
        if requested and not switches and bool(requested[0]) != self.form.thinks:
            ignored.append("thinking")
        elif EFFORT in variables and not template_reads(tokenizer, EFFORT):
            ignored.append(EFFORT)
        template_settings = {**self._template, **variables, **switches}
        return replace(request, template_settings=template_settings), ignored

    def _detokenizer(self, request: GenerationRequest) -> Detokenizer:
        detokenizer = Detokenizer(self.target.tokenizer)
        if request.continues_text:
            skip_text_start(detokenizer, self.target.tokenizer)
        return detokenizer

    def _parser(self, request: GenerationRequest, prompt: EncodedPrompt) -> AnswerParser:
        schemas = {tool.name: tool.parameters for tool in request.callable_tools}
        parser = AnswerParser(
            self.form,
            schemas=schemas,
            starts_in_reasoning=prompt.thinks_first,
            parallel=request.parallel_calls,
            detokenizer=self._detokenizer(request),
            forced=request.tool_choice == "required",
        )
        parser.begin(prompt.begun)
        return parser
