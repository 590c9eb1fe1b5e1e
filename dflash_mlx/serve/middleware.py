"""The middleware: CORS, auth, request ids, counts, log lines, and the bodies of errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import Auth
from .http_errors import RequestError, new_id
from .metrics import Metrics

NOT_FOUND: Final = (
    "There is nothing at this path. OpenAI's API is at /v1/chat/completions, /v1/completions, "
    "/v1/responses and /v1/models, Anthropic's at /v1/messages, Ollama's at /api/chat and "
    "/api/generate."
)
NO_EMBEDDINGS: Final = "This server makes no embeddings: it serves models that write text."
IGNORED: Final = b"x-dflash-ignored"  # the header that names what the server ignored
CLIENT_CLOSED: Final = 499  # nginx's status for a client that left; only the log shows it

log = logging.getLogger("dflash_mlx.serve")


class RequestMiddleware:
    """Checks the auth of a request, gives it an id, counts and logs it.

    The log contains times and statuses, but nothing of a prompt.

    Args:
        app: the application that answers.
        auth: who may use the server.
        metrics: counts responses.
    """

    def __init__(self, app: ASGIApp, auth: Auth, metrics: Metrics) -> None:
        self._app = app
        self._auth = auth
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        status = CLIENT_CLOSED
        request = Request(scope)
        request_id = new_id("req_")
        request.state.request_id = request_id

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                value = request_id.encode()
                extra = [(b"request-id", value), (b"x-request-id", value)]
                ignored = getattr(request.state, "ignored", None)
                if ignored:
                    extra.append((IGNORED, "; ".join(ignored).encode("unicode_escape")[:1000]))
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            try:
                request.state.salt = self._auth.check(request)
            except RequestError as error:
                await error_response(request, error)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.responses.labels(str(status)).inc()
            seconds = time.monotonic() - start
            path = scope["path"][:200].encode("unicode_escape").decode()
            log.info("%s %s %s %s %.3fs", request_id, scope["method"], path, status, seconds)


def error_response(request: Request, error: RequestError) -> JSONResponse:
    """Make the response of an error, in the format of the path's API."""
    path = request.url.path
    if path.startswith("/api/"):
        content = error.ollama()
    elif "/messages" in path:
        content = error.anthropic(request.state.request_id)
    else:
        content = error.openai()
    return JSONResponse(content, error.status, error.headers)


def with_middleware(routes: Sequence[Route], auth: Auth, metrics: Metrics) -> Starlette:
    """Make an application of these routes, wrapped in the middleware."""
    middleware = [Middleware(RequestMiddleware, auth=auth, metrics=metrics)]
    if auth.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=sorted(auth.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,  # Chrome asks before it lets a page use this machine
        )
        middleware.insert(0, cors)
    errors = (RequestError, HTTPException, ClientDisconnect, Exception)
    handlers = dict.fromkeys(errors, _on_error)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer a request that raised an error."""
    if isinstance(error, RequestError):
        return error_response(request, error)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    if not isinstance(error, HTTPException):
        log.error("%s failed: %r", request.state.request_id, error)
        return error_response(request, RequestError("Internal error: see the server's log.", 500))
    status = error.status_code
    if status == 404:
        message = NO_EMBEDDINGS if "/embed" in request.url.path else NOT_FOUND
    elif status == 405:
        message = "This path takes another method."
    else:
        status = 400
        message = str(error.detail)
    response = error_response(request, RequestError(message, status))
    response.headers.update(error.headers or {})
    return response
