"""The HTTP server: uvicorn with a limit on connections, and an orderly shutdown.

The application may be replaced while the server runs: until the model is loaded, an application
that answers "loading" runs. This module does not import MLX, because the BLAS is chosen first.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ServerError
from .auth import Auth
from .http_errors import RETRY_SECONDS, RequestError
from .metrics import Metrics
from .middleware import with_middleware

if TYPE_CHECKING:
    from .offered_models import Models

MAX_CONNECTIONS: Final = 256
MAX_HEADER_BYTES: Final = 2**16
GRACE_SECONDS: Final = 5  # for interrupted answers to send their last event
POLL_SECONDS: Final = 0.05
LOADING: Final = "The model is still loading: try again in a moment."


class APIServer(uvicorn.Server):
    """A uvicorn server that finishes open answers when it stops.

    It may run in any thread; `stop` may be called from any other.

    Args:
        app: the application until `set_app`.
        drain_seconds: how long `stop` waits for responses that are still being generated.
    """

    def __init__(self, app: ASGIApp, drain_seconds: float = 30.0) -> None:
        self._app = app
        self._drain_seconds = drain_seconds
        self._models: Models | None = None
        super().__init__(
            uvicorn.Config(
                self._call_app,
                http="h11",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=MAX_CONNECTIONS,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_graceful_shutdown=int(drain_seconds + GRACE_SECONDS),
            )
        )

    def set_app(self, app: ASGIApp, models: Models) -> None:
        """Replace the application. At shutdown, open answers of `models` are finished first."""
        self._models = models
        self._app = app

    async def on_tick(self, counter: int) -> bool:
        """Unload idle models. uvicorn calls this ten times a second.

        Returns whether to stop.
        """
        if self._models is not None:
            await self._models.unload_idle()
        return await super().on_tick(counter)

    @property
    def busy(self) -> bool:
        """Whether `stop` would wait for open answers."""
        return not self.should_exit and self._models is not None and self._models.busy

    def stop(self) -> None:
        """Stop after the open answers; called a second time, stop at once."""
        if self._models is not None:
            self._models.drain()
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and wait for open answers."""
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()
        if self._models is not None:
            self._models.abort()

    async def _drain(self) -> None:
        """Abort open answers after `drain_seconds`, and connections once `stop` is called again.

        `shutdown` cancels this when all connections have closed by themselves.
        """
        end = time.monotonic() + self._drain_seconds
        while time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(POLL_SECONDS)
        if self._models is not None:
            self._models.abort()
        while not self.force_exit:
            await asyncio.sleep(POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_loading_app(auth: Auth, metrics: Metrics) -> Starlette:
    """Make the application that runs while the model loads. It answers 503."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "loading", "seconds_since_round": 0.0})

    async def wait(request: Request) -> Response:
        raise RequestError(LOADING, 503, retry_after=RETRY_SECONDS)

    routes = [
        Route("/health", health),
        Route("/{path:path}", wait, methods=["GET", "POST", "DELETE"]),
    ]
    return with_middleware(routes, auth, metrics)


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket.

    Raises `ServerError` if the port is in use, or the host is not this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServerError(f"--host {host}: {error.strerror or error}.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        remedy = "give a --host that this machine has" if is_elsewhere else "give another --port"
        reason = error.strerror or error
        raise ServerError(f"{host}:{port} cannot be used ({reason}): {remedy}.") from error
    return bound
