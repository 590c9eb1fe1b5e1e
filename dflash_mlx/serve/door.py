"""Who comes in: connections are taken at once, and cost next to nothing until they ask something.

asyncio makes a transport and a protocol of every connection, as many in one go as wait: a crowd
that says nothing holds up those who ask, and pushes them out before their question is read. So the
door takes connections itself, a few at a time, and what has not sent a whole head stays a socket.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice
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

    Attributes:
        long: bytes that need no further ones to be judged.
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
        self.long = min(READ, crowd.limits.head_bytes + 1)  # of what is no head yet
        self._paused: asyncio.TimerHandle | None = None
        # By when their heads have to be whole, those who came first first; one timer is for all.
        self._callers: dict[_Caller, float] = {}
        self._late: asyncio.TimerHandle | None = None
        # What listens to them: the loop listens to it, and has to make nothing for each of them.
        self._ears = selectors.DefaultSelector()
        self._loop.add_reader(self._ears.fileno(), self._hear)
        # Whoever is taken in one go must not push out another of the same go.
        self._at_once = max(1, min(AT_ONCE, crowd.limits.connections // 4))
        bound.setblocking(False)
        bound.listen(BACKLOG)
        self._open()

    def close(self) -> None:
        """Take nobody any more."""
        for timer in filter(None, (self._paused, self._late)):
            timer.cancel()
        self._loop.remove_reader(self._bound)
        self._bound.close()
        for one in list(self._callers):
            one.abort()
        self._loop.remove_reader(self._ears.fileno())
        self._ears.close()

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
            caller = _Caller(connection, self)
            self._ears.register(connection, selectors.EVENT_READ, caller)
            self._callers[caller] = self._loop.time() + self._crowd.limits.head_seconds
            if self._late is None:
                self._send_away_late()
            self._crowd.come(caller)

    def _send_away_late(self) -> None:
        """Close those whose time is over, and come back when the next one's is."""
        self._late, now = None, self._loop.time()
        for caller, due in list(islice(self._callers.items(), AT_ONCE)):
            if due > now:
                break
            caller.abort()
        if self._callers:
            self._late = self._loop.call_at(
                next(iter(self._callers.values())), self._send_away_late
            )

    def _hear(self) -> None:
        for key, _ in self._ears.select(0):
            key.data.hear()

    def leaves(self, caller: _Caller) -> None:
        """It is nobody who waits here any more."""
        self._ears.unregister(caller.connection)
        self._callers.pop(caller, None)
        self._crowd.go(caller)

    def asks(self, connection: socket.socket, head: bytes) -> None:
        """Somebody has sent a head, or what cannot become one."""
        coming = asyncio.ensure_future(self._enter(connection, head))
        self._entering.add(coming)
        coming.add_done_callback(self._entering.discard)


class _Caller:
    """A connection whose first head is not whole yet.

    Attributes:
        connection: its socket.
    """

    def __init__(self, connection: socket.socket, door: Door) -> None:
        self.connection, self._door, self._head = connection, door, b""

    def abort(self) -> None:
        """Close it."""
        self._door.leaves(self)
        self.connection.close()

    def hear(self) -> None:
        """It says something, or has left."""
        try:
            said = self.connection.recv(READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if not said:
            self.abort()
            return
        self._head += said
        if len(self._head) >= self._door.long or _can_be_judged(self._head):
            self._door.leaves(self)
            self._door.asks(self.connection, self._head)


def _can_be_judged(head: bytes) -> bool:
    """Whether these bytes are a whole head, or nothing of HTTP at all."""
    return b"\r\n\r\n" in head or b"\n\n" in head or not head[:1].isalpha()
