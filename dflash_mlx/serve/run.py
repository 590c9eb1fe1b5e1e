"""The process: sockets within limits, and an end in order.

uvicorn serves; what is added is what it leaves open. A connection that does not send a whole head
is closed, where uvicorn would keep it and, at its limit of connections, answer 503 for ever. And at
the limit the connection that has been silent for longest goes, not the one that has just come.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from asyncio import AbstractEventLoop, Task, TimerHandle, Transport
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import ServerError
from .door import Crowd, Door, Limits

if TYPE_CHECKING:
    from .desk import Desk

GRACE: Final = 5.0  # seconds for answers that were broken off to say so


class _Guarded(HttpToolsProtocol):
    """A connection whose heads come whole and soon, or not at all."""

    crowd: Crowd  # of the server: `guarded` makes a class for each

    def __init__(self, *given: Any, head: bytes = b"", **more: Any) -> None:
        super().__init__(*given, **more)
        self._first = head  # what was read at the door
        self._timer: TimerHandle | None = None
        self._unread: TimerHandle | None = None
        self._head = 0  # bytes of a head that is not whole yet

    def abort(self) -> None:
        """Close it now."""
        self.transport.abort()

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """It begins."""
        super().connection_made(transport)
        self._arm()
        self.crowd.come(self)
        if self._first:
            self.data_received(self._first)
            self._first = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._disarm()
        self.crowd.go(self)
        self._read_again()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes, which are counted as long as they are a head."""
        if self._timer is not None:
            self._head += len(data)
        super().data_received(data)
        if self._timer is not None and self._head > self.crowd.limits.head_bytes:
            self.abort()

    def pause_writing(self) -> None:
        """The client does not read what it asked for, which keeps a place from others."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.crowd.limits.unread_seconds, self.abort)

    def resume_writing(self) -> None:
        """It reads on."""
        super().resume_writing()
        self._read_again()

    def on_message_begin(self) -> None:
        """The first byte of a head, which may be the second on this connection."""
        super().on_message_begin()
        if self._timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._disarm()
        self.crowd.silent.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """The connection is silent again, unless the next request is there."""
        super().on_response_complete()
        if self in self.crowd.here and self.cycle.response_complete:
            self.crowd.silent[self] = None

    def _arm(self) -> None:
        self._head = 0
        self._timer = self.loop.call_later(self.crowd.limits.head_seconds, self.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_again(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def guarded(crowd: Crowd) -> type[HttpToolsProtocol]:
    """The protocol of one server's connections."""
    return type("Guarded", (_Guarded,), {"crowd": crowd})


class Server(uvicorn.Server):
    """A server that ends in order: told to once it finishes its answers, told twice it goes.

    It may run in any thread, and what it is told may come from any other.

    Args:
        app: what answers until `open` brings the application.
        limits: of connections and of the end.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._crowd = app, Crowd(limits)
        super().__init__(
            uvicorn.Config(
                self._answer,
                http=guarded(self._crowd),
                ws="none",
                lifespan="off",
                loop="asyncio",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=limits.keep_alive_seconds,
                timeout_graceful_shutdown=int(limits.drain_seconds + GRACE),
            )
        )
        self._desk: Desk | None = None
        self._drain_seconds = limits.drain_seconds
        self._hurry: Task[None] | None = None
        self._doors: list[Door] = []
        self._loop: AbstractEventLoop | None = None

    def open(self, app: ASGIApp, desk: Desk) -> None:
        """Have the application answer, whose desk this is."""
        self._desk, self._app = desk, app

    @property
    def finishes(self) -> bool:
        """Whether there are answers that it would finish, were it told to end now, once."""
        return not self.should_exit and self._desk is not None and self._desk.busy

    def tell(self) -> None:
        """Have it end; told a second time it ends at once."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.handle_exit, signal.SIGTERM, None)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the doors; uvicorn itself is to take no connections."""
        self._loop = asyncio.get_running_loop()
        self._doors = [Door(bound, self._crowd, self._enter) for bound in sockets or ()]
        await super().startup([])

    async def _enter(self, connection: socket.socket, head: bytes) -> None:
        """Serve a connection that has sent this."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            found: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
                head=head,
            )
            return found

        await loop.connect_accepted_socket(protocol, connection)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing more in, and give the answers time."""
        self._hurry = asyncio.create_task(self._abandon_late())
        for door in self._doors:
            door.close()
        await super().shutdown()
        self._hurry.cancel()
        self._abandon()

    async def _abandon_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        self._abandon()

    def _abandon(self) -> None:
        if self._desk is not None:
            self._desk.abandon()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are the process's, which has an exit code of its own; it calls `tell`."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Told to end."""
        if self._desk is not None:
            self._desk.draining = True
        if not self.should_exit:
            self.should_exit = True
            return
        self.force_exit = True
        self._abandon()
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound. Raises `ServerError`: the port is taken, the host not ours."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServerError(f"--host {host}: {error.strerror or error}.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        elsewhere = getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        other = "a --host of this machine's" if elsewhere else "another --port"
        raise ServerError(f"{host}:{port} cannot be used ({reason}): give {other}.") from error
    return bound
