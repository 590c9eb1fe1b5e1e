"""The batch scheduler decides which requests wait, which run, and what they do in one step.

    waiting -> running: prefill, a chunk per step -> running: decode, one batch per step -> end

A step drops cancelled requests, admits waiting ones that fit into memory, reads a chunk of a
prompt, and decodes one token or more of every running text (`SharedBatch.step`). So a long prompt
delays the other texts by one chunk at a time. No cache is copied, padded or moved when requests
come or go.

An error in one request's own part ends that request. An error in a forward ends all requests in it.
There is one exception: if memory ran out in a shared forward, each request rebuilds its caches and
takes its next step alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import NotEnoughMemoryError
from ..events import Event
from ..request import Request
from ..targets.session import LAST_STEP, PREFILL_STEP
from ..targets.span import Span
from .cache_memory import MemoryBudget
from .job import Job
from .shared_batch import BatchItem, ErrorCapture, SharedBatch

# Prefill chunks are multiples of this many tokens, unless a step has too little time for that.
PREFILL_CHUNK = 256
# No step reads fewer tokens of a waiting prompt than this.
MIN_PREFILL_CHUNK = 16


@dataclass(eq=False)
class _Entry:
    """A request in the scheduler."""

    job: Job
    request: Request
    number: int  # requests are numbered in the order of submission
    has_read: bool = False  # whether the prompt is in its caches
    alone: bool = False  # whether its next step is not shared, because memory ran out in the last


class BatchScheduler:
    """Schedules the requests of an engine. All methods are for one thread.

    Args:
        batch: drafts and verifies for all requests of a step.
        memory: bounds the requests' caches.
        max_running: the most requests that run at once.
        stall: the seconds by which reading prompts may delay the other texts in one step.
    """

    def __init__(
        self, batch: SharedBatch, memory: MemoryBudget, max_running: int, stall: float
    ) -> None:
        self._batch = batch
        self._memory = memory
        self._max_running = max_running
        self._stall = stall
        self._prefill_rate = 0.0  # tokens per second; 0 until measured
        self._submitted = 0
        self._running: list[_Entry] = []  # in the order of submission
        self._prefilling: deque[_Entry] = deque()  # running, and taking turns to read their prompts
        self._waiting: deque[_Entry] = deque()

    @property
    def busy(self) -> bool:
        """Whether any request has not ended. Any thread may ask."""
        return bool(self._running or self._waiting)

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all requests that have not ended. Any thread may ask."""
        return [entry.job for entry in [*self._running, *self._waiting]]

    @property
    def waiting(self) -> int:
        """How many requests wait. Any thread may ask."""
        return len(self._waiting)

    def add(self, job: Job, request: Request) -> None:
        """Add a request to the waiting ones."""
        self._submitted += 1
        self._waiting.append(_Entry(job, request, self._submitted))

    def step(self) -> None:
        """Take one step of all requests. An unexpected error ends all of them."""
        with ErrorCapture() as captured:
            self._drop_cancelled()
            self._admit()
            self._prefill()
            self._decode()
        if captured.error is not None:  # a bug of ours: no job may hang
            for entry in [*self._running, *self._waiting]:
                self._end(entry, captured.error)

    def cancel_all(self) -> None:
        """Cancel every request."""
        for job in self.jobs:
            job.cancelled = True
        self._drop_cancelled()

    def preempt(self) -> None:
        """Free the caches of the youngest running request; it waits, and continues later."""
        entry = self._running[-1]
        ahead = self._batch.leave(entry.request)
        if self._goes_on(entry, lambda: entry.request.release_caches(ahead)):
            self._remove(entry)
            self._waiting.appendleft(entry)

    def _drop_cancelled(self) -> None:
        for entry in [*self._running, *self._waiting]:
            if entry.job.cancelled:
                event = Event(
                    text="",
                    tokens=[],
                    accepted=0,
                    drafted=0,
                    finish_reason="cancelled",
                    stats=entry.request.stats,
                )
                entry.job.put(event)
                self._end(entry)

    def _admit(self) -> None:
        """Start waiting requests, in their order, as long as there is room."""
        while self._waiting and len(self._running) < self._max_running:
            running = [entry.request for entry in self._running]
            if not self._memory.admits(self._waiting[0].request, running):
                break
            entry = self._waiting.popleft()
            # A new list is made, because `jobs` in another thread would see a list empty while it
            # is sorted in place.
            self._running = sorted([*self._running, entry], key=lambda entry: entry.number)
            self._start(entry)

    def _start(self, entry: _Entry) -> None:
        """Give a request its caches, and queue it to read the tokens that they do not hold."""
        request = entry.request
        if request.finished:
            entry.job.put(request.empty_event())
            self._end(entry)
            return
        if self._goes_on(entry, request.resume):
            self._prefilling.append(entry)

    def _prefill(self) -> None:
        """Read prompts in turn, up to this step's number of tokens, and their ends together."""
        budget = self._prefill_budget()
        ends: dict[_Entry, Span] = {}
        while self._prefilling and budget > 0:
            entry = self._prefilling.popleft()
            # All chunks but the last end at multiples of PREFILL_CHUNK, as in unbatched prefill.
            most = budget
            if entry.request.uncached_tokens > budget:
                most = budget // PREFILL_CHUNK * PREFILL_CHUNK or budget
            chunk = entry.request.next_chunk(most)
            assert chunk is not None
            budget -= len(chunk)
            if chunk.ends_prompt:
                ends[entry] = chunk
                continue
            started = time.perf_counter()
            if self._read(entry, chunk):
                self._prefilling.append(entry)
            if len(chunk) >= PREFILL_CHUNK // 2:  # a short chunk says little about the rate
                self._prefill_rate = len(chunk) / (time.perf_counter() - started)
        shared = [entry for entry in ends if not entry.alone]
        results: list[Any] = []
        with ErrorCapture() as captured:
            results = self._batch.read([ends[entry] for entry in shared])
        result_by_entry = dict(zip(shared, results, strict=False))  # without results, none is there
        for entry, chunk in ends.items():
            if entry in shared and captured.error is not None:
                self._leave_forward(entry, captured.error, len(shared))
            else:
                entry.has_read = self._read(entry, chunk, result_by_entry.get(entry))

    def _read(self, entry: _Entry, chunk: Span, result: Any = None) -> bool:
        """Read a chunk of a prompt. Returns whether the request goes on.

        `result` is what a shared forward returned for the chunk; None reads it now.
        """

        def read() -> None:
            request = entry.request
            event = request.read(chunk) if result is None else request.keep_read(chunk, *result)
            if event is not None:
                entry.job.put(event)
            if chunk.ends_prompt:
                request.finish_prompt()

        return self._goes_on(entry, read)

    def _leave_forward(self, entry: _Entry, error: BaseException, requests: int) -> None:
        """Take a request out of a failed forward, in which there were so many requests.

        No cache in the forward can be trusted. If memory ran out and the forward was shared, the
        request rebuilds its caches, and takes its next step alone.
        """
        if requests == 1 or not isinstance(error, NotEnoughMemoryError):
            self._end(entry, error)
            return
        entry.alone = True
        entry.has_read = False
        if self._goes_on(entry, entry.request.release_caches):
            self._start(entry)

    def _goes_on(self, entry: _Entry, work: Callable[[], object]) -> bool:
        """Do the work of one request, which an error ends. Returns whether it goes on."""
        with ErrorCapture() as captured:
            work()
        ends = captured.error is not None or entry.request.finished
        if ends:
            self._end(entry, captured.error)
        return not ends

    def _prefill_budget(self) -> int:
        """The number of prompt tokens that this step may read."""
        if len(self._prefilling) == len(self._running):
            return PREFILL_STEP + LAST_STEP  # no text is delayed
        tokens = PREFILL_CHUNK
        if self._prefill_rate:
            tokens = int(self._prefill_rate * self._stall)
        whole_chunks = tokens // PREFILL_CHUNK * PREFILL_CHUNK
        return min(PREFILL_STEP, max(MIN_PREFILL_CHUNK, whole_chunks or tokens))

    def _decode(self) -> None:
        """Take a step of all texts, after preempting some if their caches would not fit."""
        while len(self._running) > 1:
            if not self._memory.overflows([entry.request for entry in self._running]):
                break
            self.preempt()
        ready = [entry for entry in self._running if entry.has_read]
        # A request that must run alone has this step for itself; the others wait for the next one.
        entries = next(([entry] for entry in ready if entry.alone), ready)
        if not entries:
            return
        items = [BatchItem(entry.request) for entry in entries]
        with ErrorCapture() as forward:
            self._batch.step(items)
        for entry, item in zip(entries, items, strict=True):
            entry.alone = False
            if item.event is not None:
                entry.job.put(item.event)
            if entry.request.finished or item.error is not None:
                self._end(entry, item.error)
            elif forward.error is not None:
                self._leave_forward(entry, forward.error, len(items))

    def _end(self, entry: _Entry, error: BaseException | None = None) -> None:
        """End a job, and free its caches."""
        self._remove(entry)
        with ErrorCapture() as captured:
            entry.request.close(self._batch.leave(entry.request))
        error = captured.error if error is None else error
        if error is not None:
            entry.job.fail(error)

    def _remove(self, entry: _Entry) -> None:
        entry.has_read = False
        for entries in (self._running, self._prefilling, self._waiting):
            if entry in entries:
                entries.remove(entry)
