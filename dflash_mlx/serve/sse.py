"""Server-sent events: frames, pings on a silent connection, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

PING_SECONDS: Final = 5.0
WRITE_SECONDS: Final = 60.0  # for a client to read what was sent before
DONE: Final = b"data: [DONE]\n\n"

Result = TypeVar("Result")


def frame(content: Any, event: str | None = None) -> bytes:
    """An event with this JSON as its data."""
    data = b"data: %b\n\n" % to_json(content)
    return data if event is None else b"event: %b\n%b" % (event.encode(), data)


class EventStream(StreamingResponse):
    """A stream of frames, with a ping after `PING_SECONDS` of silence.

    Args:
        response: an `ApiResponse`, which is closed even if the stream never began. Its pings are
            events, because comments are silence to some clients.
    """

    def __init__(self, response: Any) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._response, self._frames = response, response.frames()
        super().__init__(self._frames, media_type=response.media_type, headers=headers)
        self._silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._response.close()

    async def stream_response(self, send: Send) -> None:
        """Send the frames, with one task that pings beside them."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        pinging = asyncio.create_task(self._send_pings(send))
        try:
            async with aclosing(self._frames) as frames:
                async for content in frames:
                    self._silent = False
                    async with asyncio.timeout(WRITE_SECONDS):
                        await send(_body(content))
        except TimeoutError:  # the client has stopped reading
            return
        finally:
            pinging.cancel()
            await asyncio.wait([pinging])
        await send(_body(b"", False))

    async def _send_pings(self, send: Send) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self._silent:
                await send(_body(self._response.frame(self._response.ping())))
            self._silent = True


def _body(content: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves.

    Raises `ClientDisconnect`.
    """
    answer = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientDisconnect
    finally:
        answer.cancel()
        leaving.cancel()
        await asyncio.wait({answer, leaving})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
