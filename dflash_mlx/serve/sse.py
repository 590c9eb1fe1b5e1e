"""Server-sent events: encoding, pings on a silent connection, and clients that leave."""

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
WRITE_SECONDS: Final = 60.0  # for a client to read earlier events
DONE: Final = b"data: [DONE]\n\n"

Result = TypeVar("Result")


def frame(content: Any, event: str | None = None) -> bytes:
    """Encode an event with this JSON as its data."""
    data = b"data: %b\n\n" % to_json(content)
    return data if event is None else b"event: %b\n%b" % (event.encode(), data)


class EventStream(StreamingResponse):
    """A stream of encoded events, with a ping after `PING_SECONDS` of silence.

    Args:
        response: an `ApiResponse`. It is closed even if the stream never begins. Its pings are
            events, because some clients ignore comments.
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
    """Yield the frames of a response, and pings after `PING_SECONDS` without a frame."""
    frames = response.frames()
    next_frame = asyncio.ensure_future(anext(frames, None))
    try:
        while True:
            done, _ = await asyncio.wait({next_frame}, timeout=PING_SECONDS)
            if not done:
                yield response.frame(response.ping())
                continue
            content = next_frame.result()
            if content is None:
                return
            yield content
            next_frame = asyncio.ensure_future(anext(frames, None))
    finally:
        next_frame.cancel()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. Cancel it if the client leaves.

    Raises `ClientDisconnect`.
    """
    answer = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientDisconnect
    finally:
        answer.cancel()
        disconnect.cancel()
        await asyncio.wait({answer, disconnect})


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
