"""The engine decodes many requests at once; each gets the same text as in a run of its own.

Any thread may submit jobs. One thread owns the arrays and takes all steps (`scheduler`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Literal, NamedTuple

from ..drafter.protocol import Drafter, check_pair, start_session
from ..errors import EngineError, SettingsError
from ..generation import GenerationSettings, make_request, resolve_policy
from ..policy.draft_policy import DraftPolicy
from ..prefix.store import PrefixStore
from ..prompt import Prompt
from ..request import Request
from ..sampling import Sampler
from ..targets import Target
from ..threads import clean_up_at_end
from ..validation import MAX_BYTES, brief, check_integer, is_positive
from .allocation import RowAllocator
from .cache_memory import MemoryBudget
from .job import Job
from .scheduler import BatchScheduler
from .shared_batch import SharedBatch

# Defaults of `Engine`: jobs that run at once, and the delay that a prompt may cause in one step.
MAX_JOBS = 32
STALL_MS = 250.0


def device_thread() -> ThreadPoolExecutor:
    """Make a thread for the steps of engines. It is joined when the program ends."""
    return ThreadPoolExecutor(1, "dflash-engine", clean_up_at_end)


class EngineLoad(NamedTuple):
    """The number of running and of waiting jobs, and the bytes of cached prefixes."""

    running: int
    waiting: int
    prefix_bytes: int


class Engine(AbstractContextManager["Engine", None]):
    """Decodes many requests of one pair together, with one forward per step.

    Close it when done, or use it as a context.

    Args:
        target, drafter: as in `stream_generate`.
        policy: for jobs without their own. It gives a step's rows to the most probable drafts of
            all jobs, as many as bring the most tokens per second. "auto" makes one; None always
            drafts full blocks.
        memory: bytes for the caches of all jobs together; None for no limit.
        prefix: a `PrefixStore` for jobs without a conversation or store of their own.
        stall_ms: for how many milliseconds reading a prompt may delay the other texts in one step.
        most_jobs: how many jobs run at once; the others wait.
        batch: drafts and verifies for all jobs; None makes a `SharedBatch`.
        thread: takes the steps; several engines may share it. None makes a thread for this engine.

    Attributes:
        progressed: when the last step ended, by `time.monotonic`.

    Raises `SettingsError`, and `IncompatibleDrafterError` for a drafter of another target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        policy: DraftPolicy | Literal["auto"] | None = None,
        memory: int | None = None,
        prefix: PrefixStore | None = None,
        stall_ms: float = STALL_MS,
        most_jobs: int = MAX_JOBS,
        batch: SharedBatch | None = None,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        check_pair(target, drafter)
        GenerationSettings(policy=policy, prefix=prefix)  # checks their types
        policy = resolve_policy(target, drafter, policy)
        memory = None if memory is None else check_integer("memory", memory, most=MAX_BYTES)
        if not is_positive(stall_ms):
            raise SettingsError(f"stall_ms must be above 0 and finite, not {brief(stall_ms)}.")
        most_jobs = check_integer("most_jobs", most_jobs)
        self._pair = (target, drafter)
        self._policy = policy
        self._prefix = prefix
        self._checked: set[int | None] = set()  # kv_bits that the pair supports
        self._check(None)
        allocator = None
        if policy is not None and drafter is not None and policy.block_size > 1:
            allocator = RowAllocator(policy)
        batch = batch or SharedBatch(target, allocator)
        layers = batch.slot_layers
        self._memory = MemoryBudget(target, drafter, size=memory, prefix=prefix, slot_layers=layers)
        self._scheduler = BatchScheduler(
            batch, self._memory, max_running=most_jobs, stall=stall_ms / 1e3
        )
        self._submitted: deque[tuple[Job, Request]] = deque()  # by other threads
        self._lock = threading.Lock()
        self._step_due = False
        self._closed = False
        self.progressed = time.monotonic()
        self._process = os.getpid()
        self._owns_thread = thread is None
        self._thread = thread or device_thread()
        self._owner: int | None = None  # the id of its thread, once it took a step

    @property
    def busy(self) -> bool:
        """Whether any job has not ended; cancelled ones count until they are dropped."""
        return bool(self._submitted) or self._scheduler.busy

    @property
    def load(self) -> EngineLoad:
        """The current load."""
        waiting = len(self._submitted) + self._scheduler.waiting
        return EngineLoad(
            running=len(self._scheduler.jobs) - self._scheduler.waiting,
            waiting=waiting,
            prefix_bytes=0 if self._prefix is None else self._prefix.used,
        )

    def submit(self, prompt: Prompt, **settings: Any) -> Job:
        """Start a job; from any thread.

        Args:
            prompt, settings: as in `stream_generate`.

        Raises what `stream_generate` raises at once, `NotEnoughMemoryError` if the text could
        outgrow the engine's memory, and `EngineError` if the engine is closed, or belongs to the
        process that this one was forked from.
        """
        if os.getpid() != self._process:
            raise EngineError(
                "The engine's thread is in the process that this one was forked from: create the "
                "engine in this process, and spawn it instead of forking."
            )
        for name in ("target", "drafter"):
            if name in settings:
                raise SettingsError(
                    f"{name} belongs to the engine: to use another one, create another engine."
                )
        settings.setdefault("policy", self._policy)
        if settings.get("conversation") is None:
            settings.setdefault("prefix", self._prefix)
        request = make_request(*self._pair, prompt, GenerationSettings.of(settings))
        with ExitStack() as close_if_refused:
            close_if_refused.callback(request.close)
            self._check(request.caches.kv_bits)
            self._memory.check(request)
            job = Job(request.stats, self._wake, self._is_mine)
            with self._lock:
                if self._closed or not (self._step_due or self._schedule()):
                    raise EngineError("The engine is closed: create another one.")
                self._submitted.append((job, request))
            close_if_refused.pop_all()
        return job

    def abandon(self, error: Exception) -> None:
        """End every job with an error, from any thread, even if the current step hangs."""
        with self._lock:
            self._closed = True
            jobs = [*(job for job, _ in self._submitted), *self._scheduler.jobs]
        for job in jobs:
            job.fail(error)

    def close(self) -> None:
        """Cancel the remaining jobs, and end the thread."""
        with self._lock:
            self._closed = True
        self._wake()
        # A logits processor may close the engine from its own thread, which cannot be joined there.
        if self._owns_thread:
            self._thread.shutdown(wait=not self._is_mine())
        elif not self._is_mine():
            self._thread.submit(int).result()  # a call of nothing, which runs after the last step

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    def _check(self, kv_bits: int | None) -> None:
        """Raise the errors of starting a request with these `kv_bits`, once each."""
        if kv_bits not in self._checked:
            target, drafter = self._pair
            target.start(() if drafter is None else drafter.tap_layers, kv_bits)
            start_session(drafter, target, Sampler())
            self._checked.add(kv_bits)

    def _is_mine(self) -> bool:
        """Whether this is the engine's thread."""
        return threading.get_ident() == self._owner

    def _wake(self) -> None:
        """Schedule a step, unless one is due."""
        with self._lock:
            if not self._step_due:
                self._schedule()

    def _schedule(self) -> bool:
        """Schedule a step, with the lock held. Returns whether that was possible."""
        with suppress(RuntimeError):  # closed, or the interpreter is ending
            self._thread.submit(self._step)
            self._step_due = True
        return self._step_due

    # In the engine's thread.

    def _step(self) -> None:
        """Take a step, and schedule the next one while jobs are left."""
        with self._lock:
            self._step_due = False
            self._owner = threading.get_ident()
            while self._submitted:
                self._scheduler.add(*self._submitted.popleft())
        if self._closed:
            self._scheduler.cancel_all()
        self._scheduler.step()
        self.progressed = time.monotonic()
        with self._lock:
            if self._scheduler.busy and not self._step_due and not self._schedule():
                self._closed = True
        if self._closed:
            self._scheduler.cancel_all()
