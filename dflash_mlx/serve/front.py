"""What surrounds an application: the guard before its paths, and what becomes of errors after them.

And the application that answers while the model loads. Nothing here imports MLX, before which the
BLAS has to be put in place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .access import Access
from .body import Bodies, Bounds
from .errors import RETRY_SECONDS, Refusal
from .guard import Guard, error_response
from .metrics import Metrics
from .sse import GoneError

LOADING: Final = "The model is being loaded: try again in a moment."
NOWHERE: Final = (
    "There is nothing at this path. OpenAI's dialect is at /v1/chat/completions, /v1/completions, "
    "/v1/responses and /v1/models, Anthropic's at /v1/messages."
)
GONE: Final = 499  # nobody reads it; the log does

log = logging.getLogger("dflash_mlx.serve")


def make_waiting_app(access: Access, metrics: Metrics) -> Starlette:
    """What answers while the model loads: that it does, and when to try again."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "loading", "seconds_since_round": 0.0})

    async def ready(request: Request) -> Response:
        return JSONResponse({"ready": False}, 503, {"Retry-After": str(RETRY_SECONDS)})

    async def page(request: Request) -> Response:
        again = {"Retry-After": str(RETRY_SECONDS), "Refresh": str(RETRY_SECONDS)}
        return PlainTextResponse(LOADING, 503, again)

    async def wait(request: Request) -> Response:
        raise Refusal(LOADING, 503, retry_after=RETRY_SECONDS)

    routes = [Route("/health", health), Route("/ready", ready), Route("/", page)]
    routes.append(Route("/{path:path}", wait, methods=["GET", "POST", "DELETE"]))
    return guarded(routes, access, metrics)


def guarded(
    routes: Sequence[Route], access: Access, metrics: Metrics, bounds: Bounds | None = None
) -> Starlette:
    """An application of these paths, with what comes before and after all of them."""
    middleware = [
        Middleware(Guard, access=access, metrics=metrics),
        Middleware(Bodies, bounds=bounds or Bounds()),
    ]
    if access.origins:
        origins = sorted(access.origins)
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            Refusal: _refused,
            HTTPException: _not_found,
            GoneError: _gone,
            Exception: _failed,
        },
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error, request.url.path, request.state.request_id)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: NOWHERE, 405: "This path takes another method."}
    status = error.status_code if error.status_code in words else 400
    refusal = Refusal(words.get(status, str(error.detail)), status)
    response = error_response(refusal, request.url.path, request.state.request_id)
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("%s failed: %r", request.state.request_id, error)
    refusal = Refusal("The server made a mistake; its log says more.", 500)
    return error_response(refusal, request.url.path, request.state.request_id)
