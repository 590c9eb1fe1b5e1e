"""The engine: many requests at once, each with the text that it would have alone.

Jobs come from any thread. One thread owns the arrays, and takes a step of all of them (`scheduler`)
after the other.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

from ..drafter.protocol import Drafter, check_pair, start_session
from ..errors import EngineError, SettingsError
from ..generation import GenerationSettings, start_request
from ..loop import Batch
from ..policy.draft_policy import DraftPolicy
from ..policy.planning import AnyPolicy
from ..prefix.cache import PrefixCache
from ..prompt import Prompt
from ..request import Request
from ..sampling import Sampler
from ..targets import Target
from ..threads import clean_up_at_end
from ..validation import MAX_BYTES, brief, check_integer, is_positive
from .allocation import RowAllocator
from .job import Job
from .memory import MemoryBudget
from .scheduler import BatchScheduler
from .together import Flat

MOST_JOBS = 32
STALL_MS = 250.0


class Engine(AbstractContextManager["Engine", None]):
    """Many requests of one pair, in one forward a round.

    Close it when done; as a context it closes itself.

    Args:
        target, drafter: as in `stream_generate`.
        policy: of the jobs that do not bring their own. With one, rows go to the likeliest drafts
            of all jobs, as many as pay on this machine; None drafts whole blocks.
        memory: bytes for the caches of all jobs together; None is without limit.
        prefix: a `PrefixStore` for the jobs that bring no conversation or store of their own.
        stall_ms: for how long reading a prompt may hold up the texts of others.
        most_jobs: how many have rounds together; the others wait for their turn.
        together: how rounds draft and verify; None is in one pass of each.

    Attributes:
        progressed: when a step was last over, a round or a chunk of a prompt, by `time.monotonic`.

    Raises `SettingsError`, and `IncompatibleDrafterError` for a drafter of another target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        policy: AnyPolicy | None = None,
        memory: int | None = None,
        prefix: PrefixCache | None = None,
        stall_ms: float = STALL_MS,
        most_jobs: int = MOST_JOBS,
        together: Batch | None = None,
    ) -> None:
        check_pair(target, drafter)
        GenerationSettings(policy=policy, prefix=prefix)  # checks their types
        memory = None if memory is None else check_integer("memory", memory, most=MAX_BYTES)
        if not is_positive(stall_ms):
            raise SettingsError(f"stall_ms must be above 0 and finite, not {brief(stall_ms)}.")
        most_jobs = check_integer("most_jobs", most_jobs)
        self._pair, self._policy, self._prefix = (target, drafter), policy, prefix
        self._fits: set[int | None] = set()  # kv_bits that the caches were tried with
        self._check(None)
        self._memory = MemoryBudget(target, drafter, memory, prefix)
        allocator = None
        if isinstance(policy, DraftPolicy) and drafter is not None and policy.longest > 1:
            allocator = RowAllocator(policy)
        together = together or Flat(target, allocator)
        self._scheduler = BatchScheduler(together, self._memory, most_jobs, stall_ms / 1e3)
        self._arrived: deque[tuple[Job, Request]] = deque()  # what other threads have put there
        self._lock, self._step_due, self._closed = threading.Lock(), False, False
        self.progressed, self._process = time.monotonic(), os.getpid()
        # Its thread waits for steps, ends with the engine, and is joined when the program ends.
        self._thread = ThreadPoolExecutor(1, "dflash-engine", clean_up_at_end)
        self._owner: int | None = None  # the thread, once it takes steps

    @property
    def busy(self) -> bool:
        """Whether a job is left, be it one that was cancelled; for any thread."""
        return bool(self._arrived) or self._scheduler.busy

    def submit(self, prompt: Prompt, **settings: Any) -> Job:
        """Have a text made; from any thread.

        Args:
            prompt, settings: those of `stream_generate`.

        Raises at once what `stream_generate` raises at once; `NotEnoughMemoryError` where the text
        could outgrow the engine's memory, and `EngineError` when the engine is closed, or in a
        process that was forked from the engine's: its thread is not there.
        """
        if os.getpid() != self._process:
            raise EngineError(
                "The engine's thread is in the process that this one was forked from: make an "
                "engine here, in a process that was spawned and not forked."
            )
        for name in ("target", "drafter"):
            if name in settings:
                raise SettingsError(f"{name} is the engine's: make another engine for another one.")
        settings.setdefault("policy", self._policy)
        if settings.get("conversation") is None:
            settings.setdefault("prefix", self._prefix)
        request = start_request(*self._pair, prompt, GenerationSettings.of(settings))
        with ExitStack() as refused:
            refused.callback(request.close)
            self._check(request.kv_bits)
            self._memory.check(request)
            job = Job(request.stats, self._wake, self._is_mine)
            with self._lock:
                if self._closed or not (self._step_due or self._schedule()):
                    raise EngineError("The engine is closed: make another.")
                self._arrived.append((job, request))
            refused.pop_all()
        return job

    def abandon(self, error: Exception) -> None:
        """End every job with an error, from any thread, even while a step never ends."""
        with self._lock:
            self._closed = True
            jobs = [*(job for job, _ in self._arrived), *self._scheduler.jobs]
        for job in jobs:
            job.fail(error)

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        with self._lock:
            self._closed = True
        self._wake()
        # One of its own jobs cannot wait for itself to end.
        self._thread.shutdown(wait=not self._is_mine())

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _check(self, kv_bits: int | None) -> None:
        """Raise what starting a request of this pair raises."""
        if kv_bits not in self._fits:
            target, drafter = self._pair
            target.start(() if drafter is None else drafter.tap_layers, kv_bits)
            start_session(drafter, target, Sampler())
            self._fits.add(kv_bits)

    def _is_mine(self) -> bool:
        """Whether this is the engine's thread."""
        return threading.get_ident() == self._owner

    def _wake(self) -> None:
        """Have a step taken, unless one is to be taken anyway."""
        with self._lock:
            if not self._step_due:
                self._schedule()

    def _schedule(self) -> bool:
        """Have a step taken; whether it will be. The lock is held."""
        with suppress(RuntimeError):  # the engine was closed, or the program ends
            self._thread.submit(self._step)
            self._step_due = True
        return self._step_due

    # What follows runs in the engine's thread.

    def _step(self) -> None:
        """A step of all, and another while anybody is left."""
        with self._lock:
            self._step_due, self._owner = False, threading.get_ident()
            while self._arrived:
                self._scheduler.add(*self._arrived.popleft())
        if self._closed:
            self._scheduler.cancel_all()
        self._scheduler.step()
        self.progressed = time.monotonic()
        with self._lock:
            if self._scheduler.busy and not self._step_due and not self._schedule():
                self._closed = True
        if self._closed:
            self._scheduler.cancel_all()
