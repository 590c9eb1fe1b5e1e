"""Who has rounds together: the requests that sit, those that wait for a seat, and their steps.

    queue  ->  a seat: read the prompt, a chunk a step  ->  rounds with all others  ->  end

In a step whoever was cancelled leaves, whoever finds room enters, prompts are read a chunk further,
and all texts that can go on have a round together (`loop.step`). So a long prompt holds up
the others by a chunk at a time. A seat is an entry in a list: whoever comes or goes, no cache is
copied, padded or moved.

What goes wrong in one request ends that request. After what goes wrong in a forward of many, nobody
knows whose caches are sound: all of them read their texts again, and each has its next round alone,
where whoever is to blame fails alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..events import Event
from ..loop import Batch, BatchItem, ErrorCapture, step
from ..request import Request
from ..targets.target import LAST_STEP, PREFILL_STEP
from .job import Job
from .memory import Memory

FIRST_CHUNK, LEAST_CHUNK = 256, 16  # tokens; chunks are multiples of the first where that is quick


@dataclass(eq=False)
class _Seat:
    """A job, its request, and how far that is."""

    job: Job
    request: Request
    number: int  # in the order of submission
    reading: Iterator[Event | None] | None = None  # what is left of the prompt
    suspect: bool = False  # a forward broke off that this request was part of


class Seats:
    """The requests of an engine; one thread's.

    Args:
        together: how rounds draft and verify.
        memory: room for the requests' caches.
        most_jobs: how many sit at once.
        stall: seconds for which reading prompts may hold up the texts.
    """

    def __init__(self, together: Batch, memory: Memory, most_jobs: int, stall: float) -> None:
        self._together, self._memory = together, memory
        self._most_jobs, self._stall = most_jobs, stall
        self._rate = 0.0  # tokens of prompts per second
        self._chunk, self._count = PREFILL_STEP, 0
        self._seats: list[_Seat] = []  # the oldest first
        self._reading: deque[_Seat] = deque()  # those that read their prompts, in turn
        self._queue: deque[_Seat] = deque()

    @property
    def busy(self) -> bool:
        """Whether anybody is left."""
        return bool(self._seats or self._queue)

    @property
    def jobs(self) -> list[Job]:
        """Of all that are left, for any thread."""
        return [seat.job for seat in [*self._seats, *self._queue]]

    def add(self, job: Job, request: Request) -> None:
        """A request waits for its seat."""
        self._count += 1
        self._queue.append(_Seat(job, request, self._count))

    def step(self) -> None:
        """Everything once."""
        with ErrorCapture() as captured:
            self._leave()
            self._enter()
            self._read()
            self._play()
        if captured.error is not None:  # a mistake of ours: nobody is to wait for ever
            for seat in [*self._seats, *self._queue]:
                self._end(seat, captured.error)

    def dismiss(self) -> None:
        """All go."""
        for seat in [*self._seats, *self._queue]:
            seat.job.cancelled = True
        self._leave()

    def give_way(self) -> None:
        """The youngest goes back to the queue and waits for room; its text will go on."""
        seat = self._seats[-1]
        self._vacate(seat)
        seat.request.suspend()
        self._queue.appendleft(seat)

    def _leave(self) -> None:
        """Whoever was cancelled goes."""
        for seat in [*self._seats, *self._queue]:
            if seat.job.cancelled:
                seat.job.put(Event("", [], 0, 0, "cancelled", seat.request.stats))
                self._end(seat)

    def _enter(self) -> None:
        """Whoever finds room comes from the queue, in its order."""
        while self._queue and len(self._seats) < self._most_jobs:
            seated = [seat.request for seat in self._seats]
            if not self._memory.enters(self._queue[0].request, seated):
                break
            seat = self._queue.popleft()
            # A new list: one that is sorted in place is empty meanwhile, to other threads.
            self._seats = sorted([*self._seats, seat], key=lambda seat: seat.number)
            self._begin(seat)

    def _begin(self, seat: _Seat) -> None:
        """A request gets its caches, and is to read what they do not hold."""
        request = seat.request
        if request.finished:
            seat.job.put(request.empty_event())
            self._end(seat)
            return
        with ErrorCapture() as captured:
            request.resume()
            seat.reading = request.prefill(lambda: self._chunk)
            self._reading.append(seat)
        if captured.error is not None:
            self._end(seat, captured.error)

    def _read(self) -> None:
        """Prompts are read on in turn, as many tokens as do not hold up the texts for too long."""
        left = self._allowance()
        while self._reading and left > 0:
            seat = self._reading.popleft()
            request, unread, clock = seat.request, seat.request.unread, time.perf_counter()
            # The last chunk ends where the prompt does, and others where they would end alone.
            self._chunk = left if unread <= left else left // FIRST_CHUNK * FIRST_CHUNK or left
            with ErrorCapture() as captured:
                self._read_on(seat)
            if captured.error is not None or request.finished:
                self._end(seat, captured.error)
                continue
            read = unread - request.unread
            left -= max(1, read)
            if read >= FIRST_CHUNK // 2:
                self._rate = read / (time.perf_counter() - clock)

    def _read_on(self, seat: _Seat) -> None:
        """One forward of a prompt; the last one brings the first token."""
        assert seat.reading is not None
        for event in seat.reading:
            if event is None:
                self._reading.append(seat)
                return
            seat.job.put(event)
        seat.reading = None

    def _allowance(self) -> int:
        """Tokens of prompts that may be read now."""
        if len(self._reading) == len(self._seats):
            return PREFILL_STEP + LAST_STEP  # nobody is held up
        tokens = int(self._rate * self._stall) if self._rate else FIRST_CHUNK
        return min(PREFILL_STEP, max(LEAST_CHUNK, tokens // FIRST_CHUNK * FIRST_CHUNK or tokens))

    def _play(self) -> None:
        """All texts that can go on have a round together."""
        while self._memory.overflows([each.request for each in self._seats]) and self._seats[1:]:
            self.give_way()
        ready = [seat for seat in self._seats if seat.reading is None]
        party = next(([seat] for seat in ready if seat.suspect), ready)
        if not party:
            return
        turns = [BatchItem(seat.request) for seat in party]
        with ErrorCapture() as captured:
            step(turns, self._together)
        if captured.error is not None:
            self._break_off(party, captured.error)
            return
        for seat, turn in zip(party, turns, strict=True):
            seat.suspect = False
            if turn.event is not None:
                seat.job.put(turn.event)
            if seat.request.finished or turn.error is not None:
                self._end(seat, turn.error)

    def _break_off(self, party: list[_Seat], error: BaseException) -> None:
        """A forward of these broke off."""
        if len(party) == 1:
            self._end(party[0], error)
            return
        for seat in party:
            seat.suspect = True
            seat.request.suspend()
            self._begin(seat)

    def _end(self, seat: _Seat, error: BaseException | None = None) -> None:
        """A job has ended, and its caches are free."""
        self._vacate(seat)
        with ErrorCapture() as captured:
            seat.request.close()
        error = error or captured.error
        if error is not None:
            seat.job.fail(error)

    def _vacate(self, seat: _Seat) -> None:
        seat.reading = None
        for seats in (self._seats, self._reading, self._queue):
            if seat in seats:
                seats.remove(seat)
