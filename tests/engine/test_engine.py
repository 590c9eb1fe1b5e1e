"""The engine: jobs of several threads, errors that end one job only, and cancelling."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from families import small_prompt
from request_set import RequestSet, SteppedEngine
from tinymodels import random_drafter

import dflash_mlx as dm
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import (
    EngineError,
    NotEnoughMemoryError,
    ProposalError,
    SettingsError,
    UnsupportedTreeError,
)

SOON = 60  # seconds after which a test fails rather than hangs


def test_jobs_submitted_by_several_threads_give_the_texts_of_each_request_alone(request_set):
    oracle = request_set.oracle(0.8)
    with dm.Engine(request_set.target, oracle) as engine, ThreadPoolExecutor(6) as pool:
        futures = [
            pool.submit(engine.submit, prompt, **settings)
            for prompt, settings in request_set.requests
        ]
        jobs = [future.result() for future in futures]
        for job, alone in zip(jobs, request_set.alone, strict=True):
            events = list(job)
            assert [token for event in events for token in event.tokens] == alone
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
            result = job.result(SOON)
            assert result.tokens == alone and result.finish_reason == "length"
            assert result.text == "".join(event.text for event in events)
            assert result.stats.output_tokens == len(alone) and job.done


def test_jobs_are_read_asynchronously_at_the_same_time(request_set):
    """And a reader that is cancelled while it waits disturbs nothing."""

    async def read(job: dm.Job) -> list[int]:
        return [token async for event in job for token in event.tokens]

    async def main(engine: dm.Engine) -> list[list[int]]:
        cancelled = asyncio.create_task(anext(request_set.submit_to(engine)[0], None))
        cancelled.cancel()
        return await asyncio.gather(*(read(job) for job in request_set.submit_to(engine)))

    with dm.Engine(request_set.target, request_set.oracle(0.8)) as engine:
        assert asyncio.run(main(engine)) == request_set.alone


def test_a_conversation_continues_from_its_caches(request_set):
    conversation = dm.Conversation(request_set.target, None)
    with dm.Engine(request_set.target, None) as engine:
        first = engine.submit([1, 2, 3], max_tokens=8, conversation=conversation)
        with pytest.raises(SettingsError, match="has not ended"):
            engine.submit([1, 2, 3], conversation=conversation)
        prompt = [1, 2, 3, *first.result(SOON).tokens, 4]
        second = engine.submit(prompt, max_tokens=5, conversation=conversation)
        without_conversation = engine.submit(prompt, max_tokens=5)
        assert second.result(SOON).tokens == without_conversation.result(SOON).tokens
        # The first answer's last token was never read, and token 4 is new.
        assert second.stats.reused_tokens == len(prompt) - 2


# Refused jobs, and jobs that fail


def test_closing_an_engine_cancels_its_jobs_and_later_ones_are_refused(request_set):
    engine = dm.Engine(request_set.target, None)
    job = engine.submit([1, 2], max_tokens=4000)
    next(job)
    engine.close()
    assert job.result(SOON).finish_reason == "cancelled" and job.result(SOON).tokens
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1, 2])
    engine.close()


def failing_processor(after: int) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that raises once the text has more than `after` tokens."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > after:
            raise ZeroDivisionError("the grammar is broken")
        return logits

    return process


def nan_processor(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits * mx.nan


TOO_WIDE = small_prompt(9, 77)
BRANCHES = small_prompt(9, 78)


class FaultyDrafter:
    """Proposes too many rows after the prompt TOO_WIDE, and a tree after BRANCHES."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.tap_layers = drafter.tap_layers

    def start(self, target, sampler):
        session = self.drafter.start(target, sampler)
        propose = session.propose

        def faulty_propose(anchor: int, width: int) -> dm.Proposal:
            prompt = session.tokens[: len(TOO_WIDE)]
            if prompt == TOO_WIDE:
                return dm.Proposal([anchor] * (width + 1))
            if prompt == BRANCHES and width > 2:
                return dm.Proposal([anchor, 1, 2], (-1, 0, 0))
            return propose(anchor, width)

        session.propose = faulty_propose
        return session


def test_an_error_fails_only_its_own_job(request_set, monkeypatch):
    """Of a logits processor, of NaN logits, of a draft that is too wide, and of a refused tree."""
    monkeypatch.setattr(request_set.target, "why_no_trees", "states")
    failing_settings = [
        ({"logits_processors": [failing_processor(9)]}, ZeroDivisionError),
        ({"logits_processors": [nan_processor]}, SettingsError),
        ({"prompt": TOO_WIDE}, ProposalError),
        ({"prompt": BRANCHES}, UnsupportedTreeError),
    ]
    drafter = FaultyDrafter(request_set.oracle(0.8))
    drafter.drafter.texts += [[*TOO_WIDE, 1], [*BRANCHES, 1]]
    with dm.Engine(request_set.target, drafter) as engine:
        jobs = request_set.submit_to(engine)
        failing_jobs = []
        for settings, error in failing_settings:
            prompt = settings.pop("prompt", request_set.requests[0][0])
            failing_jobs.append((engine.submit(prompt, **settings), error))
        for job, error in failing_jobs:
            with pytest.raises(error):
                list(job)
            with pytest.raises(error):
                job.result(SOON)
        assert [job.result(SOON).tokens for job in jobs] == request_set.alone


class FailingBatch(SharedBatch):
    """A batch whose forward fails after it has written the caches, where `fails` says so.

    `fails` is called with the tokens of each request in the forward.
    """

    def __init__(
        self, target: dm.Target, error: Exception, fails: Callable[[list[list[int]]], bool]
    ) -> None:
        super().__init__(target, None)
        self.error = error
        self.fails = fails
        self.failures = 0

    def verify(self, turns, tokens=None):
        verified = super().verify(turns, tokens)
        if self.fails([turn.request.caches.draft_session.tokens for turn in turns]):
            self.failures += 1
            raise self.error
        return verified


NO_MEMORY = NotEnoughMemoryError("The device has no memory left.")


def run_failing_batch(
    request_set: RequestSet, error: Exception, fails: Callable[[list[list[int]]], bool]
) -> tuple[list[dm.Job], FailingBatch]:
    """All jobs of a request set, run in a `FailingBatch`, and the batch."""
    batch = FailingBatch(request_set.target, error, fails)
    engine = SteppedEngine(request_set.target, request_set.oracle(0.8), batch)
    jobs = request_set.submit_to(engine)
    engine.run()
    return jobs, batch


def test_a_forward_without_memory_ends_only_the_request_that_needs_too_much(request_set):
    """The engine repeats a failed forward for each request alone."""
    large_prompt = request_set.requests[2][0]

    def needs_too_much(tokens: list[int]) -> bool:
        is_large = tokens[: len(large_prompt)] == large_prompt
        return is_large and len(tokens) > len(large_prompt) + 8

    jobs, batch = run_failing_batch(
        request_set, NO_MEMORY, lambda texts: any(needs_too_much(tokens) for tokens in texts)
    )
    with pytest.raises(NotEnoughMemoryError, match="no memory left"):
        jobs.pop(2).result()
    assert [job.result().tokens for job in jobs] == [*request_set.alone[:2], *request_set.alone[3:]]
    assert batch.failures == 2  # with the others, and alone


def test_a_shared_forward_without_memory_is_repeated_for_each_request_alone(request_set):
    """No job fails: only the fourth to the sixth forward of several requests lack memory."""
    failures = iter([False] * 3 + [True] * 3 + [False] * 10**4)
    jobs, batch = run_failing_batch(
        request_set, NO_MEMORY, lambda texts: len(texts) > 1 and next(failures)
    )
    assert [job.result().tokens for job in jobs] == request_set.alone
    assert batch.failures == 3


def test_no_job_fails_where_memory_runs_out_as_a_shared_step_starts(request_set, monkeypatch):
    """MLX allocates when it starts to compute, not only where a step waits for results."""
    async_eval = mx.async_eval
    failures = iter([False, True, True, False, True] + [False] * 10**4)

    def fail_once(*arrays: object) -> None:
        monkeypatch.setattr(mx, "async_eval", async_eval)
        raise RuntimeError("[metal::malloc] Unable to allocate 4096 bytes.")

    class BatchWithoutMemory(SharedBatch):
        def verify(self, turns, tokens=None):
            verified = super().verify(turns, tokens)
            if len(turns) > 1 and next(failures):
                monkeypatch.setattr(mx, "async_eval", fail_once)
            return verified

    batch = BatchWithoutMemory(request_set.target, None)
    engine = SteppedEngine(request_set.target, None, batch)
    jobs = request_set.submit_to(engine)
    engine.run()
    assert [job.result().tokens for job in jobs] == request_set.alone
    assert not any(failures), "a failure did not happen"


def test_another_error_of_a_forward_ends_all_jobs_in_it(request_set):
    """It may be the fault of any of them, and a second try would hide a bug of ours."""
    failures = iter([False, True])
    error = RuntimeError("the device was lost")
    jobs, _ = run_failing_batch(request_set, error, lambda texts: next(failures))
    for job in jobs:
        with pytest.raises(RuntimeError, match="device was lost"):
            job.result()


def test_a_request_that_joins_shares_the_next_pipelined_forward(request_set):
    """Its first step has a separate forward, and all texts are those of each request alone."""
    forwards: list[tuple[int, int]] = []  # the number of requests and of rows

    class CountingBatch(SharedBatch):
        def verify(self, turns, tokens=None):
            logits, taps = super().verify(turns, tokens)
            forwards.append((len(turns), len(logits)))
            return logits, taps

    engine = SteppedEngine(request_set.target, None, CountingBatch(request_set.target, None))
    jobs = []
    alone = []
    for (prompt, settings), tokens in zip(request_set.requests, request_set.alone, strict=True):
        if "presence_penalty" in settings:  # such a request is not pipelined
            continue
        jobs.append(engine.submit(prompt, **settings))
        alone.append(tokens)
        for _ in range(4):
            engine.scheduler.step()
    assert not any(job.done for job in jobs)
    assert forwards[-1] == (len(jobs), len(jobs))
    engine.run()
    assert [job.result().tokens for job in jobs] == alone


def test_the_last_chunks_of_prompts_are_read_in_one_forward(request_set):
    """Also that of a prompt of several chunks. Without memory, each is read alone."""
    requests_per_read: list[int] = []

    class ReadingBatch(SharedBatch):
        def read(self, together):
            requests_per_read.append(len(together))
            results = super().read(together)
            if len(together) == 7:
                raise NO_MEMORY
            return results

    long_request = (small_prompt(3 * 64 + 5, 9), {"max_tokens": 9})
    seven_requests = RequestSet(request_set.target, [*request_set.requests, long_request])
    for requests in (request_set, seven_requests):
        requests_per_read.clear()
        batch = ReadingBatch(requests.target, None)
        engine = SteppedEngine(requests.target, requests.oracle(0.8), batch)
        jobs = requests.submit_to(engine)
        engine.run()
        assert [job.result().tokens for job in jobs] == requests.alone
        assert max(requests_per_read) == len(jobs)


def test_a_cancelled_job_is_freed_by_the_next_step(request_set):
    engine = SteppedEngine(
        request_set.target, request_set.oracle(0.0), SharedBatch(request_set.target, None)
    )
    jobs = request_set.submit_to(engine)
    for _ in range(4):
        engine.scheduler.step()
    cancelled_request = weakref.ref(engine.scheduler._running[1].request)
    rounds = jobs[1].stats.rounds
    jobs[1].cancel()
    engine.scheduler.step()
    assert jobs[1].result().finish_reason == "cancelled" and jobs[1].stats.rounds == rounds
    assert cancelled_request() is None
    assert len(engine.scheduler._running) == len(jobs) - 1
    engine.run()
    assert jobs[1].result().tokens == request_set.alone[1][: rounds + 1]
    assert [job.result().tokens for job in jobs[2:]] == request_set.alone[2:]


def test_hundreds_of_jobs_leak_no_memory_and_no_objects(request_set):
    """Of which some finish, some are cancelled and some fail."""

    def run_jobs(engine: dm.Engine, count: int) -> None:
        jobs = []
        for number in range(count):
            prompt = [1 + number % 99, 2, 3]
            settings = {"max_tokens": 2}
            if number % 5 == 3:
                settings["logits_processors"] = [failing_processor(3)]
            jobs.append(engine.submit(prompt, **settings))
            if number % 5 == 4:
                jobs[-1].cancel()
        for job in jobs:
            try:
                job.result(SOON)
            except ZeroDivisionError:
                pass

    def count_memory_and_objects() -> tuple[int, int]:
        gc.collect()
        return mx.get_active_memory(), len(gc.get_objects())

    with dm.Engine(request_set.target, random_drafter()) as engine:
        run_jobs(engine, 50)
        memory_before, objects_before = count_memory_and_objects()
        run_jobs(engine, 150)
        engine.submit([1], max_tokens=1).result(SOON)
        memory_after, objects_after = count_memory_and_objects()
    assert memory_after <= memory_before + 2**20
    assert objects_after <= objects_before + 200
