"""Server-sent events: frames, pings on a silent connection, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

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
        super().__init__(_with_pings(response), media_type=response.media_type, headers=headers)
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._response.close()

    async def stream_response(self, send: Send) -> None:
        """Send the frames, until the client stops reading."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(WRITE_SECONDS):
                await send(message)

        with suppress(TimeoutError):
            await super().stream_response(send_in_time)


async def _with_pings(response: Any) -> AsyncIterator[bytes]:
    """The frames of a response, and its ping where none has come for `PING_SECONDS`."""
    frames = response.frames()
    coming = asyncio.ensure_future(anext(frames, None))
    try:
        while True:
            while not (await asyncio.wait({coming}, timeout=PING_SECONDS))[0]:
                yield response.frame(response.ping())
            if (content := coming.result()) is None:
                return
            yield content
            coming = asyncio.ensure_future(anext(frames, None))
    finally:
        coming.cancel()


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
