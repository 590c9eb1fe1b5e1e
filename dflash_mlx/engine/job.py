"""A job: what somebody waits for while the engine makes it."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

from ..errors import EngineError
from ..events import Event, FinishReason, Result, Stats


class Job(Iterator[Event], AsyncIterator[Event], Awaitable[Result]):
    """A request in an engine: an iterator of its events, for `for` and for `async for`.

    Several readers share the events among them. `result`, or `await`, waits beside them, and needs
    none. Whoever reads slowly, or not at all, delays nobody: events wait here.

    Args:
        stats: the request's counters.
        wake: has the engine look at this job again.
        makes: whether the calling thread is the one that makes the text.
    """

    def __init__(
        self, stats: Stats, wake: Callable[[], None], makes: Callable[[], bool] = lambda: False
    ) -> None:
        self.stats = stats
        self._wake, self._makes = wake, makes
        self._news = threading.Condition()
        self._events: deque[Event] = deque()
        self._asleep: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None  # to where it was raised
        self.cancelled = False

    def __repr__(self) -> str:
        """A line: how it ended, and how many tokens there are."""
        state = (
            type(self._error).__name__ if self._error else repr(self._finish_reason or "goes on")
        )
        return f"Job({state}, {len(self._tokens)} tokens)"

    def __iter__(self) -> Job:
        """This."""
        return self

    def __next__(self) -> Event:
        """The next event. Raises what the request raised, after the events before it.

        Raises `EngineError` in the thread that makes the text, where it could not come.
        """
        with self._news:
            self._wait_for(lambda: bool(self._events) or self.done)
            event = self._take()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> Job:
        """This."""
        return self

    async def __anext__(self) -> Event:
        """The next event, as `next`, while other tasks of the event loop go on."""
        while True:
            with self._news:
                if self._events or self.done:
                    event = self._take()
                    break
                arrived = self._arrival()
            await arrived
        if event is None:
            raise StopAsyncIteration
        return event

    def __await__(self) -> Generator[Any, None, Result]:
        """As `result`, while other tasks of the event loop go on."""
        while True:
            with self._news:
                if self.done:
                    return self.result()
                arrived = self._arrival()
            yield from arrived

    @property
    def done(self) -> bool:
        """Whether the text has ended, in one way or another."""
        return self._finish_reason is not None or self._error is not None

    def result(self, timeout: float | None = None) -> Result:
        """All of it, once it has ended; of a cancelled job what there was.

        Raises what the request raised, `TimeoutError` after `timeout` seconds, and `EngineError` as
        `next` does.
        """
        with self._news:
            if not self._wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"The job has not ended within {timeout} seconds.")
            self._raise()
            assert self._finish_reason is not None
            return Result("".join(self._text), [*self._tokens], self._finish_reason, self.stats)

    def cancel(self) -> None:
        """End it: the round that runs is its last, and its caches are free. Ended, it stays so."""
        self.cancelled = True
        self._wake()

    def put(self, event: Event) -> None:
        """An event, from the engine."""
        with self._news:
            if self._error is not None:  # it was abandoned meanwhile
                return
            self._events.append(event)
            self._text.append(event.text)
            self._tokens += event.tokens
            self._finish_reason = event.finish_reason
            self._tell()

    def fail(self, error: BaseException) -> None:
        """It cannot go on, says the engine."""
        # The frames hold the request and its caches for as long as somebody holds the error.
        traceback.clear_frames(error.__traceback__)
        with self._news:
            if self._error is None:
                self._error, self._trace = error, error.__traceback__
            self._tell()

    def _arrival(self) -> asyncio.Future[None]:
        """Of the next news, for a task of the running event loop. The lock is held."""
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        self._asleep.append((loop, arrived))
        return arrived

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for news; whether they came. Raises `EngineError` where they never can."""
        if not condition() and self._makes():
            raise EngineError(
                "A job cannot be waited for by the thread that makes its text, as a logits "
                "processor of another job: wait in a thread of your own."
            )
        return self._news.wait_for(condition, timeout)

    def _take(self) -> Event | None:
        """The first event that waits; None at the end. Raises what the request raised."""
        if self._events:
            return self._events.popleft()
        self._raise()
        return None

    def _raise(self) -> None:
        """Raise what the request raised, if it did: for each reader without the readers before."""
        if self._error is not None:
            raise self._error.with_traceback(self._trace)

    def _tell(self) -> None:
        """Wake who waits."""
        self._news.notify_all()
        asleep, self._asleep = self._asleep, []
        for loop, arrived in asleep:
            with suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_arrive, arrived)


def _arrive(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():  # whoever waited may have been cancelled
        arrived.set_result(None)
