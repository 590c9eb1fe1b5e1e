"""Rank 0's part: it decides, and has the others do the same on their shards.

Everything that changes a session's caches is told to them: what needs no other rank (a commit, a
cut, a mark) waits for the next forward, and goes with it in one message. A forward is computed as
soon as it is built, on all ranks the same arrays in the same order, so that their sums meet; the
lock keeps the forwards of two threads apart.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import ClusterError, DFlashError
from ..proposal import Proposal
from ..threads import clean_up_at_end
from ..validation import ErrorWrapper
from .watchdog import Watch
from .wire import Kind, Told, Wire

IDLE_SECONDS = 1.0  # of silence, after which the others rest between messages
REST_SECONDS = 0.2  # for which they do: a rank that waits in a sum keeps a core busy
LOST = "A machine of the cluster does not answer any more"

Answer = TypeVar("Answer")


class Leader:
    """Tells the other ranks what to do.

    Args:
        wire: to them; all are there.
        stall: seconds that a forward may take before the others are given up.
        lost: called once with what is wrong, in any thread, when they are; and whether a thread
            waits for them that will not come back.
        carry: brings what a forward returns together from all ranks; they all do it.

    Attributes:
        messages: forwards that were told; `beats` are not among them.
    """

    def __init__(
        self,
        wire: Wire,
        stall: float,
        lost: Callable[[ClusterError, bool], None],
        carry: Callable[[Any], Any] = lambda answer: answer,
    ) -> None:
        self._wire, self._lost, self._carry = wire, lost, carry
        self._numbers = count()
        self._told: deque[Told] = deque()  # since the last message
        self._lock, self._leading = threading.RLock(), False
        self._problem: str | None = None
        self._last = time.monotonic()
        self.messages = self.beats = 0
        self._watch = Watch(stall, self._stalled)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="dflash-beat", daemon=True)
        self._beating.start()
        atexit.register(self.close)

    def number(self) -> int:
        """A new one, of a session, a mark or a piece."""
        return next(self._numbers)

    def tell(self, kind: Kind, *numbers: int) -> None:
        """Have the others do something before the next forward; from any thread."""
        self._told.append(Told(kind, numbers))

    def lead(self, forward: Callable[[], Answer], kind: Kind, numbers: Sequence[int]) -> Answer:
        """Have all ranks run a forward; what it returns here, computed.

        Raises `ClusterError` when one of them is lost, now or earlier.
        """
        with self._lock:
            if self._leading:  # it is part of one that they know about
                return forward()
            with self._attempt():
                self.messages += 1
                self._cast(Told(kind, numbers))
                answer: Answer = self._carry(forward())
                mx.eval(answer)
                self._last = time.monotonic()
            return answer

    def verify(
        self,
        forward: Callable[[Sequence[Any], Sequence[Proposal]], Answer],
        sessions: Sequence[Any],
        proposals: Sequence[Proposal],
    ) -> Answer:
        """Lead the verify of these sessions' proposals, whose tokens are read for it."""
        numbers: list[int] = []
        known = []
        for session, proposal in zip(sessions, proposals, strict=True):
            ids, chain = _read(proposal.tokens), proposal.is_chain
            session.introduce()
            numbers += [session.number, len(ids), chain, *ids, *(() if chain else proposal.parents)]
            known.append(Proposal(ids, proposal.parents))
        return self.lead(lambda: forward(sessions, known), Kind.VERIFY, numbers)

    def give_up(self, problem: str, stuck: bool = False) -> None:
        """The others are lost: whatever is led from now on fails."""
        if self._problem is None:
            self._problem = problem
            self._ended.set()
            self._watch.close()
            self._lost(ClusterError(problem), stuck)

    def close(self) -> None:
        """Let the others go."""
        atexit.unregister(self.close)
        self._ended.set()
        if self._problem is not None:  # then threads may wait for ever
            return
        self._beating.join()
        with self._lock:
            if self._problem is None:
                self._problem = "The cluster is closed: join it anew."
                with ErrorWrapper(ClusterError, LOST), self._watch.expecting():
                    self._cast(Told(Kind.STOP))
        self._watch.close()

    def _cast(self, last: Told) -> None:
        told = [self._told.popleft() for _ in range(len(self._told))]
        self._wire.cast([*told, last])

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """What fails inside, half done, leaves the ranks with different caches."""
        if self._problem is not None:
            raise ClusterError(self._problem)
        self._leading, whole = True, False
        try:
            with ErrorWrapper(ClusterError, LOST), self._watch.expecting():
                yield
            whole = True
        except DFlashError as error:
            self.give_up(str(error))
            raise
        finally:
            self._leading = False
            if not whole and self._problem is None:  # Ctrl-C: the others wait for this forward
                self._problem = "A forward was interrupted: join the cluster anew."
                self._ended.set()
                self._watch.close()

    def _stalled(self, seconds: float) -> None:
        self.give_up(f"{LOST}: nothing has come back for {seconds:.0f} s.", stuck=True)

    def _beat(self) -> None:
        """Have the others rest while there is nothing to do, and see that they are there."""
        clean_up_at_end()
        while not self._ended.wait(REST_SECONDS):
            if time.monotonic() - self._last < IDLE_SECONDS:
                continue
            with self._lock:
                if self._ended.is_set():
                    return
                try:
                    with self._attempt():
                        self.beats += 1
                        self._cast(Told(Kind.BEAT))
                except ClusterError:
                    return  # whoever waits for the others has been told


def _read(tokens: Sequence[int] | mx.array) -> list[int]:
    """Token ids, which may still be on their way."""
    ids: Any = tokens.tolist() if isinstance(tokens, mx.array) else list(tokens)
    return list(ids)
