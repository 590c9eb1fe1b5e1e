"""Server-sent events: frames, what keeps a silent connection alive, and who leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

PING_SECONDS: Final = 10.0
COMMENT: Final = ": still at it\n\n"

Whole = TypeVar("Whole")


class GoneError(Exception):
    """The client has left: there is nobody to answer."""


def frame(content: Any, event: str | None = None) -> str:
    """An event with this JSON as its data."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {data}\n\n" if event is None else f"event: {event}\ndata: {data}\n\n"


async def with_pings(
    frames: AsyncIterator[str], ping: str, seconds: float = PING_SECONDS
) -> AsyncIterator[str]:
    """The same frames, and a ping whenever none came for so many seconds."""
    coming: asyncio.Future[str] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait({coming}, timeout=seconds)
            if not done:
                yield ping
                continue
            arrived, coming = coming, None
            try:
                yield arrived.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming


class EventStream(StreamingResponse):
    """A stream of frames; `leave` is called when it is over, also if it never began."""

    def __init__(self, frames: AsyncIterator[str], leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


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
