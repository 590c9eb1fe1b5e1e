"""Many requests at once, each with the text that it would have alone.

    submit  ->  queue  ->  a seat: read the prompt, a chunk a step  ->  rounds with all others

One thread owns the arrays and takes a step after the other: who was cancelled leaves, who finds
room enters, prompts are read a chunk further, and all texts that can go on have a round together
(`loop.play_round`). So a long prompt holds up the others by a chunk at a time. A seat is an entry
in a list: whoever comes or goes, no cache is copied, padded or moved.

What goes wrong in one request ends that request. After what goes wrong in a forward of many, nobody
knows whose caches are sound: all of them read their texts again, and each has its next round alone,
where whoever is to blame fails alone.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from ..begin import begin
from ..drafter.plain import NoDrafter
from ..drafter.protocol import Drafter
from ..errors import EngineError, SettingsError
from ..events import Event
from ..loop import Attempt, Together, play_round
from ..policy.rounds import AnyPolicy
from ..policy.trees import TreePolicy
from ..policy.widths import Policy
from ..prompt import Prompt
from ..reading import is_positive, is_whole, shown
from ..request import Request
from ..sampling import Sampler
from ..target import Target
from ..target.target import PREFILL_STEP
from ..threads import clean_up_at_end
from .costs import SharedCosts
from .job import Job
from .memory import Memory
from .rows import SharedRounds
from .together import Flat

MOST_JOBS = 32
STALL_MS = 250.0
FIRST_CHUNK, LEAST_CHUNK = 256, 16  # tokens; chunks are multiples of the first where that is quick


@dataclass(eq=False)
class _Seat:
    """A job, its request, and how far that is."""

    job: Job
    request: Request
    number: int  # in the order of submission
    reading: Iterator[None] | None = field(default=None)  # what is left of the prompt
    suspect: bool = False  # a forward broke off that this request was part of


class Engine:
    """Many requests of one pair, in one forward a round.

    Close it when done; as a context it closes itself.

    Args:
        target, drafter: as in `stream_generate`.
        policy: of the jobs that do not bring their own. With one, rows go to the likeliest drafts
            of all jobs, as many as pay on this machine, which is measured now unless it is known;
            None drafts whole blocks.
        memory: bytes for the caches of all jobs together; None is without limit.
        stall_ms: for how long reading a prompt may hold up the texts of others.
        most_jobs: how many have rounds together; the others wait for their turn.
        together: how rounds draft and verify; None is in one pass of each.

    Raises `SettingsError`, and `IncompatibleDrafterError` for a drafter of another target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        policy: AnyPolicy | None = None,
        memory: int | None = None,
        stall_ms: float = STALL_MS,
        most_jobs: int = MOST_JOBS,
        together: Together | None = None,
    ) -> None:
        if memory is not None and not is_whole(memory, 1, 2**63):
            raise SettingsError(f"memory must be None or a number of bytes, not {shown(memory)}.")
        if not is_positive(stall_ms):
            raise SettingsError(f"stall_ms must be above 0, not {shown(stall_ms)}.")
        if not is_whole(most_jobs):
            raise SettingsError(
                f"most_jobs must be a whole number, 1 or more, not {shown(most_jobs)}."
            )
        self._pair, self._policy = (target, drafter), policy
        self._fits: set[int | None] = set()  # kv_bits that the caches were tried with
        self._check(None)
        self._memory, self._most_jobs = Memory(target, drafter, memory), most_jobs
        self._together = together or Flat(target, _shared_rounds(target, drafter, policy))
        self._stall, self._rate = stall_ms / 1e3, 0.0  # seconds; tokens of prompts per second
        self._seats: list[_Seat] = []  # the oldest first
        self._reading: deque[_Seat] = deque()  # those that read their prompts, in turn
        self._queue: deque[_Seat] = deque()
        self._arrived: deque[_Seat] = deque()  # what other threads have put there
        self._numbers, self._chunk = itertools.count(), PREFILL_STEP
        self._lock, self._scheduled, self._closed = threading.Lock(), False, False
        # Its thread waits for steps, ends with the engine, and is joined when the program ends.
        self._thread = ThreadPoolExecutor(1, "dflash-engine", clean_up_at_end)

    def submit(self, prompt: Prompt, **settings: Any) -> Job:
        """Have a text made; from any thread.

        Args:
            prompt, settings: those of `stream_generate`.

        Raises at once what `stream_generate` raises at once; `NotEnoughMemoryError` where the text
        could outgrow the engine's memory, and `EngineError` when the engine is closed.
        """
        settings.setdefault("policy", self._policy)
        request = begin(*self._pair, prompt, **settings)
        self._check(request.kv_bits)
        self._memory.check(request)
        job = Job(request.stats, self._wake)
        with self._lock:
            if not self._closed and (self._scheduled or self._schedule()):
                self._arrived.append(_Seat(job, request, next(self._numbers)))
                return job
        raise EngineError("The engine is closed: make another.")

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.shutdown()

    def __enter__(self) -> Self:
        """This."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _check(self, kv_bits: int | None) -> None:
        """Raise what starting a request of this pair raises."""
        if kv_bits not in self._fits or kv_bits is None:
            target, drafter = self._pair
            drafter = drafter or NoDrafter()
            target.start(drafter.tap_layers, kv_bits)
            drafter.start(target, Sampler())
            self._fits.add(kv_bits)

    def _wake(self) -> None:
        """Have a step taken, unless one is to be taken anyway."""
        with self._lock:
            if not self._scheduled:
                self._schedule()

    def _schedule(self) -> bool:
        """Have a step taken; whether it will be. The lock is held."""
        with suppress(RuntimeError):  # the engine was closed, or the program ends
            self._thread.submit(self._step)
            self._scheduled = True
        return self._scheduled

    # What follows runs in the engine's thread.

    def _step(self) -> None:
        """Everything once, and another step while anything is left."""
        with self._lock:
            self._queue.extend(self._arrived)
            self._arrived.clear()
            self._scheduled = False
        with Attempt() as attempt:
            self._leave()
            self._enter()
            self._read()
            self._play()
        if attempt.error is not None:  # a mistake of ours: nobody is left to wait for ever
            for seat in self._all():
                self._end(seat, attempt.error)
        with self._lock:
            if self._all() and not self._scheduled and not self._schedule():
                self._closed = True
        self._leave()

    def _all(self) -> list[_Seat]:
        return [*self._seats, *self._queue]

    def _leave(self) -> None:
        """Whoever was cancelled goes; all do when the engine is closed."""
        for seat in self._all():
            if seat.job.cancelled or self._closed:
                seat.job.put(Event("", [], 0, 0, "cancelled", seat.request.stats))
                self._end(seat)

    def _enter(self) -> None:
        """Whoever finds room comes from the queue, in its order."""
        while self._queue and len(self._seats) < self._most_jobs:
            seated = [seat.request for seat in self._seats]
            if not self._memory.enters(self._queue[0].request, seated):
                break
            seat = self._queue.popleft()
            self._seats.append(seat)
            self._seats.sort(key=lambda seat: seat.number)
            self._begin(seat)

    def _begin(self, seat: _Seat) -> None:
        """A request gets its caches, and is to read what they do not hold."""
        request = seat.request
        if request.finished:
            seat.job.put(request.nothing())
            self._end(seat)
            return
        with Attempt() as attempt:
            request.resume()
            seat.reading = request.read(lambda: self._chunk)
            self._reading.append(seat)
        if attempt.error is not None:
            self._end(seat, attempt.error)

    def _read(self) -> None:
        """Prompts are read on in turn, as many tokens as do not hold up the texts for too long."""
        left = self._allowance()
        while self._reading and left > 0:
            seat = self._reading.popleft()
            begin, clock = seat.request.target.position, time.perf_counter()
            unread = seat.request.tokens - begin
            # The last chunk ends where the prompt does, and others where they would end alone.
            self._chunk = left if unread <= left else left // FIRST_CHUNK * FIRST_CHUNK or left
            with Attempt() as attempt:
                assert seat.reading is not None
                for _ in seat.reading:
                    self._reading.append(seat)
                    break
                else:
                    seat.reading = None
            if attempt.error is not None:
                self._end(seat, attempt.error)
                continue
            read = seat.request.target.position - begin
            left -= max(1, read)
            if read >= FIRST_CHUNK // 2:
                self._rate = read / (time.perf_counter() - clock)

    def _allowance(self) -> int:
        """Tokens of prompts that may be read now."""
        if len(self._reading) == len(self._seats):
            return PREFILL_STEP  # nobody is held up
        tokens = int(self._rate * self._stall) if self._rate else FIRST_CHUNK
        return min(PREFILL_STEP, max(LEAST_CHUNK, tokens // FIRST_CHUNK * FIRST_CHUNK or tokens))

    def _play(self) -> None:
        """All texts that can go on have a round together."""
        while self._memory.overflows([seat.request for seat in self._seats]):
            self._give_way(self._seats[-1])
        ready = [seat for seat in self._seats if seat.reading is None]
        party = next(([seat] for seat in ready if seat.suspect), ready)
        if not party:
            return
        with Attempt() as attempt:
            turns = play_round([seat.request for seat in party], self._together)
        if attempt.error is not None:
            self._break_off(party, attempt.error)
            return
        for seat, turn in zip(party, turns, strict=True):
            seat.suspect = False
            if turn.event is not None:
                seat.job.put(turn.event)
            if seat.request.finished or turn.error is not None:
                self._end(seat, turn.error)

    def _give_way(self, seat: _Seat) -> None:
        """A request goes back to the queue, where it waits for room; its text will go on."""
        self._vacate(seat)
        seat.request.suspend()
        self._queue.appendleft(seat)

    def _break_off(self, party: list[_Seat], error: Exception) -> None:
        """A forward of these broke off."""
        if len(party) == 1:
            self._end(party[0], error)
            return
        for seat in party:
            seat.suspect = True
            seat.request.suspend()
            self._begin(seat)

    def _end(self, seat: _Seat, error: Exception | None = None) -> None:
        """A job has ended, and its caches are free."""
        self._vacate(seat)
        seat.request.close()
        if error is not None:
            seat.job.fail(error)

    def _vacate(self, seat: _Seat) -> None:
        seat.reading = None
        for seats in (self._seats, self._reading, self._queue):
            if seat in seats:
                seats.remove(seat)


def _shared_rounds(
    target: Target, drafter: Drafter | None, policy: AnyPolicy | None
) -> SharedRounds | None:
    """What shares out rows by their cost; None where none of them is to be weighed."""
    chains = policy.chains if isinstance(policy, TreePolicy) else policy
    if drafter is None or not isinstance(chains, Policy) or chains.widest == 1:
        return None
    return SharedRounds(SharedCosts.of(target, drafter, chains.costs, chains.widest))
