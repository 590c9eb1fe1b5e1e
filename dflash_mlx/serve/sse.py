"""Server-sent events: frames, what keeps a silent connection alive, and who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

PING_SECONDS: Final = 5.0  # a silent connection hears something after once or twice that
COMMENT: Final = b": still at it\n\n"

Frames = AsyncGenerator[bytes, None]
Whole = TypeVar("Whole")


class GoneError(Exception):
    """The client has left: there is nobody to answer."""


def frame(content: Any, event: str | None = None) -> bytes:
    """An event with this JSON as its data."""
    data = b"data: %b\n\n" % to_json(content)
    return data if event is None else b"event: %b\n%b" % (event.encode(), data)


class Chunks:
    """Makes frames of objects that begin alike, whose beginning is written down once.

    Args:
        head: what they begin with; they say nothing of it again.
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = b"data: %b," % to_json(head)[:-1]

    def frame(self, rest: Mapping[str, Any]) -> bytes:
        """An event with the beginning and this."""
        return b"%b%b\n\n" % (self._head, to_json(rest)[1:])


class EventStream(StreamingResponse):
    """A stream of frames, and a ping where none comes for a while.

    Args:
        frames: any number of events in each, which go out in one piece.
        ping: what keeps a silent connection alive.
        leave: called when it is over, also if it never began.
    """

    def __init__(
        self,
        frames: Frames,
        ping: bytes,
        leave: Callable[[], None],
        seconds: float = PING_SECONDS,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._frames, self._ping, self._leave, self._seconds = frames, ping, leave, seconds
        self._silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()

    async def stream_response(self, send: Send) -> None:
        """Send the frames. None has a task or a timer of its own: there are thousands a second."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        pinging = asyncio.create_task(self._send_pings(send))
        try:
            async with aclosing(self._frames) as frames:
                async for one in frames:
                    self._silent = False
                    await send({"type": "http.response.body", "body": one, "more_body": True})
        finally:
            pinging.cancel()
            with suppress(asyncio.CancelledError):
                await pinging
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            if self._silent:
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})
            self._silent = True


async def unless_gone(request: Request, work: Coroutine[Any, Any, Whole]) -> Whole:
    """What `work` returns, which is cancelled when the client leaves. Raises `GoneError`."""
    answer = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise GoneError
    finally:
        for task in (answer, left):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
