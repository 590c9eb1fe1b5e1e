"""Who comes in: connections are taken at once, and cost next to nothing until they ask something.

asyncio makes a transport and a protocol of every connection, as many in one go as wait: a crowd
that says nothing holds up those who ask, and pushes them out before their question is read. So the
door takes connections itself, a few at a time, and what has not sent a whole head stays a socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

BACKLOG: Final = 4096  # a connection that finds no room there tries again after a whole second
AT_ONCE: Final = 32  # connections that are taken before others have their turn
PAUSE: Final = 0.2  # seconds, where there is no room for another file
READ: Final = 8192  # bytes of a head that are waited for here


@dataclass(frozen=True)
class Limits:
    """What connections may take.

    Attributes:
        connections: at once.
        head_bytes, head_seconds: of a request before its body.
        keep_alive_seconds: of silence between two requests.
        unread_seconds: for which an answer may lie there without its client reading on.
        drain_seconds: for answers to end once the server is told to.
    """

    connections: int = 256
    head_bytes: int = 64 * 2**10
    head_seconds: float = 10.0
    keep_alive_seconds: int = 5
    unread_seconds: float = 60.0
    drain_seconds: float = 30.0


class Connection(Protocol):
    """One of a crowd."""

    def abort(self) -> None:
        """Close it now."""


@dataclass
class Crowd:
    """The connections of a server.

    Attributes:
        limits: of theirs.
        here: all but those that were told to go.
        silent: of these the ones without a request in work, the longest silent first.
    """

    limits: Limits
    here: set[Connection] = field(default_factory=set)
    silent: dict[Connection, None] = field(default_factory=dict)

    def come(self, one: Connection) -> None:
        """Somebody comes: somebody may have to go."""
        self.here.add(one)
        self.silent[one] = None
        if len(self.here) > self.limits.connections:
            self.shed()

    def go(self, one: Connection) -> None:
        """Somebody goes."""
        self.here.discard(one)
        self.silent.pop(one, None)

    def shed(self) -> None:
        """The one that has been silent for longest goes."""
        if longest := next(iter(self.silent), None):
            self.go(longest)
            longest.abort()


class Door:
    """Takes the connections of a socket, and lets in those that ask something.

    Args:
        bound: the socket.
        crowd: of all connections.
        enter: makes more of one, and of what it has sent.
    """

    def __init__(
        self,
        bound: socket.socket,
        crowd: Crowd,
        enter: Callable[[socket.socket, bytes], Awaitable[Any]],
    ) -> None:
        self._bound, self._crowd, self._enter = bound, crowd, enter
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Future[Any]] = set()
        self._paused: asyncio.TimerHandle | None = None
        # Whoever is taken in one go must not push out another of the same go.
        self._at_once = max(1, min(AT_ONCE, crowd.limits.connections // 4))
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._open()

    def close(self) -> None:
        """Take nobody any more."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._bound)
        self._bound.close()
        for one in list(self._crowd.silent):
            if isinstance(one, _Caller):
                one.abort()

    def _open(self) -> None:
        self._paused = None
        self._loop.add_reader(self._bound, self._take)

    def _take(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # too many files are open
                self._crowd.shed()
                self._loop.remove_reader(self._bound)
                self._paused = self._loop.call_later(PAUSE, self._open)
                return
            connection.setblocking(False)
            self._crowd.come(_Caller(connection, self._crowd, self._asks))

    def _asks(self, connection: socket.socket, head: bytes) -> None:
        coming = asyncio.ensure_future(self._enter(connection, head))
        self._entering.add(coming)
        coming.add_done_callback(self._entering.discard)


class _Caller:
    """A connection whose first head is not whole yet."""

    def __init__(
        self, connection: socket.socket, crowd: Crowd, asks: Callable[[socket.socket, bytes], None]
    ) -> None:
        self._connection, self._crowd, self._asks = connection, crowd, asks
        self._head = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._hear)
        self._late = self._loop.call_later(crowd.limits.head_seconds, self.abort)

    def abort(self) -> None:
        """Close it."""
        self._leave()
        self._connection.close()

    def _leave(self) -> None:
        self._crowd.go(self)
        self._late.cancel()
        self._loop.remove_reader(self._connection.fileno())

    def _hear(self) -> None:
        """It says something, or has left."""
        try:
            said = self._connection.recv(READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if not said:
            self.abort()
            return
        self._head += said
        long = min(READ, self._crowd.limits.head_bytes + 1)
        if len(self._head) >= long or _can_be_judged(self._head):
            self._leave()
            self._asks(self._connection, self._head)


def _can_be_judged(head: bytes) -> bool:
    """Whether these bytes are a whole head, or nothing of HTTP at all."""
    return b"\r\n\r\n" in head or b"\n\n" in head or not head[:1].isalpha()
