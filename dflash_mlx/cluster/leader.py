"""Rank 0 decides; the other ranks repeat its operations on their parts of the model.

Rank 0 sends every operation on a session's caches. An operation that needs no answer (a commit, a
trim, a checkpoint) waits for the next forward and travels in the same message. All ranks compute
the same arrays in the same order, because they take part in the same sums; a lock keeps the
forwards of different threads apart.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import ClusterError, DFlashError
from ..threads import clean_up_at_end
from ..validation import ErrorWrapper
from .channel import (
    HEARTBEAT,
    MLX_ERRORS,
    NO_ANSWER,
    REST_SECONDS,
    STOP,
    TARGET,
    Channel,
    Operation,
)
from .watchdog import Watchdog

# After this long without a forward, the other ranks sleep between messages.
IDLE_SECONDS = 1.0

Result = TypeVar("Result")


class Leader:
    """Sends rank 0's operations to the other ranks.

    Args:
        channel: the channel to the other ranks.
        stall: how many seconds a forward may take before the cluster is given up.
        lost: called once, in any thread, with the error that ends the cluster, and with whether a
            thread waits forever.

    Attributes:
        messages: how many forwards were sent.
        heartbeats: how many messages were sent while idle.
    """

    def __init__(
        self,
        channel: Channel,
        stall: float,
        lost: Callable[[ClusterError, bool], None],
    ) -> None:
        self._channel = channel
        self._lost = lost
        self._numbers = count(TARGET + 1)
        self._pending: deque[Operation] = deque()  # to go with the next message
        self._lock = threading.RLock()
        self._in_forward = False
        self._problem: str | None = None
        self._last = time.monotonic()
        self.messages = 0
        self.heartbeats = 0
        self._watchdog = Watchdog(stall, self._stalled)
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(
            target=self._send_heartbeats, name="dflash-heartbeat", daemon=True
        )
        self._heartbeat.start()
        atexit.register(self.close)

    def repeat(self, owner: int, method: str, *arguments: Any) -> int:
        """Have the other ranks call a method of the object `owner` before the next forward.

        Returns the number under which they keep the result.
        """
        number = next(self._numbers)
        self._pending.append((number, owner, method, *arguments))
        return number

    def drop(self, number: int) -> None:
        """Have the other ranks forget an object. Any thread may call this."""
        self._pending.append((number, number, None))

    def run(self, forward: Callable[[], Result], kind: str, *arguments: Any) -> Result:
        """Run a forward on all ranks. Returns rank 0's result, computed.

        Raises `ClusterError` when a rank is lost, now or earlier.
        """
        with self._lock:
            if self._in_forward:  # this is part of a forward that the others already run
                return forward()
            with self._guard():
                self.messages += 1
                self._send((kind, *arguments))
                result: Result = self._channel.gather(forward())
                mx.eval(result)
                self._last = time.monotonic()
            return result

    def give_up(self, problem: str, stuck: bool = False) -> None:
        """End the cluster: every later forward fails with this problem."""
        if self._problem is None:
            self._end(problem)
            self._lost(ClusterError(problem), stuck)

    def close(self) -> None:
        """Tell the other ranks to end."""
        atexit.unregister(self.close)
        self._ended.set()
        if self._problem is not None:  # a thread may hold the lock forever
            return
        self._heartbeat.join()
        with self._lock:
            if self._problem is None:
                with ErrorWrapper(ClusterError, NO_ANSWER, MLX_ERRORS), self._watchdog.watching():
                    self._send((STOP,))
                self._end("The cluster is closed: join it again.")

    def _end(self, problem: str) -> None:
        self._problem = problem
        self._ended.set()
        self._watchdog.close()

    def _send(self, last: Operation) -> None:
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        self._channel.send([*pending, last])

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """End the cluster if the body fails, because the ranks' caches then differ."""
        if self._problem is not None:
            raise ClusterError(self._problem)
        self._in_forward = True
        complete = False
        try:
            with ErrorWrapper(ClusterError, NO_ANSWER, MLX_ERRORS), self._watchdog.watching():
                yield
            complete = True
        except DFlashError as error:
            self.give_up(str(error))
            raise
        finally:
            self._in_forward = False
            if not complete and self._problem is None:  # Ctrl-C: the others wait for this forward
                self._end("A forward was interrupted: join the cluster again.")

    def _stalled(self, seconds: float) -> None:
        self.give_up(f"{NO_ANSWER}: nothing has come back for {seconds:.0f} s.", stuck=True)

    def _send_heartbeats(self) -> None:
        """While there is no forward, let the other ranks sleep, and check that they answer."""
        clean_up_at_end()
        while not self._ended.wait(REST_SECONDS):
            if time.monotonic() - self._last < IDLE_SECONDS:
                continue
            with self._lock:
                if self._ended.is_set():
                    return
                try:
                    with self._guard():
                        self.heartbeats += 1
                        self._send((HEARTBEAT,))
                except ClusterError:
                    return  # `give_up` has reported it
