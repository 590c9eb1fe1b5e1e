"""What happens to every request before anybody reads it: it is judged, named, counted, logged."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import Access
from .errors import Refusal
from .metrics import Metrics
from .openai_forms import new_id

log = logging.getLogger("dflash_mlx.serve")


def is_anthropic(path: str) -> bool:
    """Whether errors of this path are to be Anthropic's."""
    return "/messages" in path


def error_response(refusal: Refusal, path: str, request_id: str) -> JSONResponse:
    """A refusal in the form of the path's dialect."""
    content = refusal.anthropic(request_id) if is_anthropic(path) else refusal.openai()
    return JSONResponse(content, refusal.status, refusal.headers)


class Guard:
    """Checks each request before anybody reads it, names it, counts it, logs it.

    Logs tell who asked for what and how it went, and nothing of what a prompt says.

    Args:
        app: what is guarded.
        access: who may speak.
        metrics: counted here.
    """

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, request_id = time.monotonic(), new_id("req_")
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                pair = request_id.encode()
                extra = [(b"request-id", pair), (b"x-request-id", pair)]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            try:
                who = self._access.check(scope["path"], Headers(scope=scope))
            except Refusal as refusal:
                await error_response(refusal, scope["path"], request_id)(scope, receive, named)
            else:
                scope["state"]["who"] = who
                await self._app(scope, receive, named)
        finally:
            self._metrics.responses.labels(str(status or 499)).inc()
            log.info(
                "%s %s %s %s %.3fs",
                request_id,
                scope["method"],
                printable(scope["path"]),
                status or "client left",
                time.monotonic() - start,
            )


def printable(text: str) -> str:
    """Text of a client's for a line of a log: short, and without what steers a terminal."""
    return text[:200].encode("unicode_escape").decode()
