"""Between the dialects and the engine: requests become jobs, their rounds become steps.

Nothing here waits for the device or holds up the loop that the sockets are served by: threads of
the desk's work out templates and grammars and hand requests to the engine, which has its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import DFlashError
from ..threads import clean_up_at_end
from . import harmony
from .answering import Answering, Job, Open
from .ask import Ask
from .errors import RETRY_SECONDS, Refusal, of_library
from .grammar import Grammars
from .harmony import HarmonySplitter
from .length import LeastTokens
from .logprobs import Recorder, Vocabulary
from .metrics import Metrics
from .parts import Splitter
from .template import Encoded, encode
from .tools import Syntax

if TYPE_CHECKING:
    from ..targets import Target

FAULT: Final = 500
THREADS: Final = 4  # a grammar may take one of them for a second

log = logging.getLogger("dflash_mlx.serve")


class Engine(Protocol):
    """What works on requests, such as `dflash_mlx.Engine`.

    Attributes:
        progressed: when it last got on, with a round or with a prompt, by `time.monotonic`.
        busy: whether a job is left, be it one that was cancelled.
    """

    progressed: float

    @property
    def busy(self) -> bool: ...

    def submit(self, prompt: Sequence[int], **settings: Any) -> Job:
        """A job that has these settings of `stream_generate`."""


class Desk:
    """Takes requests in, as many as there is room for.

    Args:
        target: whose answers these are.
        engine: makes them.
        defaults: settings of requests that do not name them.
        room: answers that may be worked on or wait at once.
        metrics: counted here.

    Attributes:
        draining: whether new requests are sent away, because the server ends.
        lost: whether it ends because machines that share the target have lost each other.
    """

    def __init__(
        self,
        target: Target,
        engine: Engine,
        defaults: Mapping[str, Any],
        room: int,
        metrics: Metrics,
    ) -> None:
        self.target, self.metrics = target, metrics
        speaks = harmony.speaks_harmony(target.tokenizer)
        self.syntax = harmony.syntax() if speaks else Syntax.of(target.tokenizer)
        self.draining = self.lost = False
        self._engine, self._defaults, self._room = engine, dict(defaults), room
        self._grammars, self._least = Grammars(target), LeastTokens(target.tokenizer)
        self._vocabulary = Vocabulary(target.tokenizer)
        self._threads = ThreadPoolExecutor(THREADS, "dflash-serve", clean_up_at_end)
        self._answering: set[Answering] = set()
        self._taken, self._since, self._abandoned = 0, 0.0, False

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer."""
        return bool(self._answering)

    @property
    def still(self) -> float:
        """Seconds since the engine got on, or had something to do; 0 while it has not.

        Where all have left, a device that does not come back still keeps their jobs.
        """
        if not (self.busy or self._engine.busy):
            return 0.0
        return time.monotonic() - max(self._since, self._engine.progressed)

    async def encode(self, ask: Ask) -> Encoded:
        """The prompt of a request. Raises `Refusal`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, ask)

    async def ask(self, ask: Ask, who: str = "") -> Answering:
        """Start to answer.

        Args:
            ask: the request.
            who: asks; nobody else's prompts are shared with it.

        Raises `Refusal`.
        """
        self.check_room([ask])
        self._take_room(ask.n)
        if idle := not (self.busy or self._engine.busy):
            self._since = time.monotonic()
        begun = self._threads.submit(self._begin, ask, who)
        try:
            encoded, jobs = await asyncio.wrap_future(begun)
        except BaseException as error:
            self._taken -= ask.n
            begun.add_done_callback(_cancel)  # where nobody waited for it any more
            if isinstance(error, DFlashError):
                raise self.refused(error) from error
            raise
        if idle:
            self._since = time.monotonic()
        answering = Answering(self, ask, encoded, jobs)
        self._answering.add(answering)
        if self._abandoned:
            answering.leave()
        return answering

    def refused(self, error: DFlashError) -> Refusal:
        """What is told to a client; a fault of our own is told in the log and counted, too."""
        refusal = of_library(error)
        if refusal.status == FAULT:
            self.metrics.failed.inc()
            log.error("an answer could not be finished", exc_info=error)
        return refusal

    def close(self, answering: Answering, jobs: int) -> None:
        """An `Answering` is over."""
        self._answering.discard(answering)
        self._taken -= jobs
        self.metrics.open.set(self._taken)

    def abandon(self) -> None:
        """End every answer where it is, and those that begin now."""
        self._abandoned = True
        for answering in list(self._answering):
            answering.leave()

    def check_room(self, asks: Sequence[Ask]) -> None:
        """Raise `Refusal` for more answers than there is ever room for, however long one waits."""
        wanted = sum(ask.n for ask in asks)
        if wanted > self._room:
            told = f"This server works on {self._room} answers at most, not on {wanted}."
            raise Refusal(told, param="n" if len(asks) == 1 else asks[0].origin)

    def _take_room(self, jobs: int) -> None:
        """Room for so many answers more. Raises `Refusal` where there is none."""
        if self.draining:
            raise Refusal("The server is shutting down.", 503, retry_after=RETRY_SECONDS)
        if self._taken + jobs > self._room:
            raise Refusal(
                f"The queue is full ({self._room} answers): try again later.",
                429,
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        self._taken += jobs
        self.metrics.open.set(self._taken)

    # What follows runs in a thread of the desk's.

    def _encode(self, ask: Ask) -> Encoded:
        return encode(self.target, self.syntax, ask, self._least)

    def _begin(self, ask: Ask, who: str) -> tuple[Encoded, list[Open]]:
        """The prompt of a request, and its jobs. Raises `DFlashError`."""
        encoded = self._encode(ask)
        grammars = self._grammars.of(self.syntax, ask, encoded.thinking)
        jobs: list[Open] = []
        try:
            for choice, grammar in enumerate(grammars):
                jobs.append(self._submit(ask, who, encoded, grammar, choice))
        except DFlashError:
            for one in jobs:
                one.job.cancel()
            raise
        return encoded, jobs

    def _submit(self, ask: Ask, who: str, encoded: Encoded, grammar: Any, choice: int) -> Open:
        settings = self._defaults | dict(ask.settings)
        if who:
            settings["salt"] = who
        if ask.goes_on:
            settings["continues"] = True
        if settings.get("seed") is not None:
            settings["seed"] = (settings["seed"] + choice) % 2**32
        recorder = None
        if ask.top_logprobs is not None:
            recorder = Recorder(self._vocabulary, ask.top_logprobs)
        processors = [one for one in (recorder, grammar) if one is not None]
        if processors:
            settings["logits_processors"] = processors
        splitter: Splitter | HarmonySplitter
        if self.syntax.name == harmony.NAME:
            splitter = HarmonySplitter(ask.callable, ask.parallel)
        else:
            splitter = Splitter(
                self.target.tokenizer, self.syntax, ask.callable, encoded.thinking, ask.parallel
            )
        return Open(self._engine.submit(encoded.ids, **settings), splitter, recorder)


def _cancel(begun: Future[tuple[Encoded, list[Open]]]) -> None:
    """End what was begun for somebody who did not wait for it."""
    if not begun.cancelled() and begun.exception() is None:
        for one in begun.result()[1]:
            one.job.cancel()
