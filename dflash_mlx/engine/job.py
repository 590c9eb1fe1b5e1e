"""A job is the caller's side of a request that an engine runs."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from typing import Any

from ..errors import EngineError
from ..events import Event, FinishReason, Result, Stats


class Job(Iterator[Event], AsyncIterator[Event], Awaitable[Result]):
    """A request in an engine: an iterator of its events, for `for` and for `async for`.

    Several readers share the events. `result`, or `await`, waits for the end and needs no reader.
    Events queue up here, so a slow reader delays no other request.

    Args:
        stats: the request's counters.
        wake: makes the engine look at this job again.
        in_engine_thread: tells whether the calling thread is the engine's, which must never wait.

    Attributes:
        stats: the request's counters.
        cancelled: whether `cancel` was called.
    """

    def __init__(
        self,
        stats: Stats,
        wake: Callable[[], object],
        in_engine_thread: Callable[[], bool] = lambda: False,
    ) -> None:
        self.stats = stats
        self.cancelled = False
        self._wake = wake
        self._in_engine_thread = in_engine_thread
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        """One line: the state and the number of tokens."""
        error = None if self._error is None else type(self._error).__name__
        state = error or (repr(self._finish_reason) if self._finish_reason else "running")
        return f"Job({state}, {len(self._tokens)} tokens)"

    def __next__(self) -> Event:
        """Return the next event. Raises the request's error after the events before it.

        Raises `EngineError` in the engine's own thread, where it would wait forever.
        """
        with self._changed:
            self._wait_for(lambda: bool(self._events) or self.done)
            event = self._take()
        if event is None:
            raise StopIteration
        return event

    async def __anext__(self) -> Event:
        """Return the next event; other tasks of the event loop run meanwhile."""
        while True:
            with self._changed:
                if self._events or self.done:
                    event = self._take()
                    break
                change = self._next_change()
            await change
        if event is None:
            raise StopAsyncIteration
        return event

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait as `result` does, while other tasks of the event loop run."""
        while True:
            with self._changed:
                if self.done:
                    return self.result()
                change = self._next_change()
            yield from change

    @property
    def done(self) -> bool:
        """Whether the text has ended, was cancelled, or failed."""
        return self._finish_reason is not None or self._error is not None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end, and return the whole text, or the text so far of a cancelled job.

        Raises the request's error, `TimeoutError` after `timeout` seconds, and `EngineError` in the
        engine's own thread.
        """
        with self._changed:
            if not self._wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"The job has not ended within {timeout} seconds.")
            self._raise_error()
            assert self._finish_reason is not None
            return Result(
                text="".join(self._text),
                tokens=list(self._tokens),
                finish_reason=self._finish_reason,
                stats=self.stats,
            )

    def cancel(self) -> None:
        """End the job after its current step. A job that has ended stays as it is."""
        self.cancelled = True
        self._wake()

    def put(self, event: Event) -> None:
        """Add an event. Only the engine calls this."""
        with self._changed:
            if self._error is not None:  # abandoned meanwhile
                return
            self._events.append(event)
            self._text.append(event.text)
            self._tokens += event.tokens
            self._finish_reason = event.finish_reason
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End the job with an error. Only the engine calls this.

        A `StopIteration` of a callback would end a reader's loop as if the text were complete. As
        in Python's generators, it is the cause of a `RuntimeError` instead.
        """
        _drop_frames(error)
        if isinstance(error, StopIteration | StopAsyncIteration):
            cause = error
            error = RuntimeError(f"A callback raised {type(error).__name__}.")
            error.__cause__ = cause
        with self._changed:
            if self._error is None:
                self._error = error
            self._notify()

    def _next_change(self) -> asyncio.Future[None]:
        """Make a future for a task of the running event loop. The lock is held."""
        loop = asyncio.get_running_loop()
        change = loop.create_future()
        self._waiters.append((loop, change))
        return change

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds; False after the timeout. Raises `EngineError`."""
        if not condition() and self._in_engine_thread():
            raise EngineError(
                "A job cannot be waited for in the engine's own thread, for example in a logits "
                "processor of another job: wait in a thread of your own."
            )
        return self._changed.wait_for(condition, timeout)

    def _take(self) -> Event | None:
        """Remove and return the first event; None at the end. Raises the request's error."""
        if self._events:
            return self._events.popleft()
        self._raise_error()
        return None

    def _raise_error(self) -> None:
        """Raise the request's error, if any, without the tracebacks of earlier readers."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _notify(self) -> None:
        if self.done:  # a job that nobody reads must not keep the engine alive
            self._wake = _nothing
            self._in_engine_thread = _nothing
        self._changed.notify_all()
        waiters = self._waiters
        self._waiters = []
        for loop, change in waiters:
            with suppress(RuntimeError):  # the loop is closed, so no task waits there
                loop.call_soon_threadsafe(_resolve, change)


def _drop_frames(error: BaseException) -> None:
    """Replace the traceback of an error by a note of its text.

    Its frames and those of their callers would keep the request, its caches and the engine alive.
    """
    if not getattr(error, "__notes__", None):  # the same error may be raised again
        trace = "".join(traceback.format_tb(error.__traceback__))
        error.add_note(f"Traceback in the engine's thread:\n{trace}")
    link: BaseException | None = error
    while link is not None:
        link = link.with_traceback(None)
        link = link.__context__ if link.__cause__ is None else link.__cause__


def _nothing() -> bool:
    """Stand in for an engine's methods."""
    return False


def _resolve(change: asyncio.Future[None]) -> None:
    if not change.done():  # the waiting task may have been cancelled
        change.set_result(None)
