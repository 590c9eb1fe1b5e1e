"""The engine used in ways its docs do not describe: failing callbacks, forks, forgotten closes."""

import asyncio
import gc
import os
import weakref
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from families import small_prompt
from program import run_code
from request_set import SteppedEngine
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import EngineError, SettingsError
from dflash_mlx.request import Request

PROMPT = small_prompt(9, seed=1)
SOON = 60  # seconds after which a test fails rather than hangs


@pytest.fixture
def engine():
    with dm.Engine(target(), random_drafter()) as engine:
        yield engine


def call_at(length: int, function):
    """A logits processor that calls a function when the text has `length` tokens."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) == length:
            function()
        return logits

    return process


class UnusualError(Exception):
    """An error that is false, equal to all others and not hashable, as errors may be."""

    def __len__(self):
        return 0

    def __eq__(self, other):
        return True

    __hash__ = None


def callback_settings(fail):
    """Settings with a callback that calls `fail`: at the prompt's end, or some tokens later."""
    yield {"logits_processors": [call_at(len(PROMPT), fail)]}
    yield {"logits_processors": [call_at(len(PROMPT) + 4, fail)]}
    calls = 0

    def stop_applies(*_):
        nonlocal calls
        calls += 1
        if calls == 5:
            fail()
        return True

    yield {"stop": ["@@"], "stop_applies": stop_applies}


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), UnusualError("ours"), ValueError("ours"), KeyError("x")],
)
def test_an_error_of_a_callback_ends_only_its_job_and_is_raised_unchanged(engine, error):
    """Also an error that would end the program if it was raised in the main thread."""

    def fail():
        raise error

    others = [engine.submit(PROMPT, max_tokens=20) for _ in range(2)]
    # Two jobs of the engine and a call without an engine, each with new callbacks.
    for first, second, third in zip(*(callback_settings(fail) for _ in range(3)), strict=True):
        jobs = [engine.submit(PROMPT, **first), engine.submit(PROMPT, **second)]
        calls = [partial(job.result, SOON) for job in jobs]
        calls.append(partial(dm.generate, target(), None, PROMPT, **third))
        for call in calls:
            with pytest.raises(type(error)) as caught:
                call()
            assert caught.value is error
    plain = dm.generate(target(), None, PROMPT, max_tokens=20).tokens
    assert [job.result(SOON).tokens for job in others] == [plain, plain]


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_a_stop_iteration_of_a_callback_is_raised_as_a_runtime_error(engine, error):
    """Otherwise a loop over a job's events would take it for the end of the text."""

    def fail():
        raise error("ran out")

    async def read(job):
        return [event async for event in job]

    for wait in (list, lambda job: asyncio.run(read(job)), lambda job: job.result(SOON)):
        for settings in callback_settings(fail):
            with pytest.raises(RuntimeError) as caught:
                wait(engine.submit(PROMPT, **settings))
            assert type(caught.value.__cause__) is error


def test_a_job_may_close_its_engine():
    engine = dm.Engine(target(), None)
    job = engine.submit(PROMPT, logits_processors=[call_at(len(PROMPT) + 3, engine.close)])
    assert job.result(SOON).finish_reason == "cancelled"
    with pytest.raises(EngineError, match="closed"):
        engine.submit(PROMPT)


def test_a_jobs_logits_processor_may_submit_another_job(engine):
    submitted = []

    def submit():
        submitted.append(engine.submit(PROMPT, max_tokens=3))

    processors = [call_at(len(PROMPT), submit)]
    engine.submit(PROMPT, max_tokens=9, logits_processors=processors).result(SOON)
    assert len(submitted[0].result(SOON).tokens) == 3


@pytest.mark.parametrize("wait", [next, dm.Job.result, lambda job: job.result(SOON)])
def test_waiting_for_a_job_in_the_engines_thread_is_an_error(engine, wait):
    """It would wait for ever, and all other jobs as well."""

    def submit_and_wait():
        wait(engine.submit(PROMPT, max_tokens=2))

    processors = [call_at(len(PROMPT), submit_and_wait)]
    job = engine.submit(PROMPT, max_tokens=5, logits_processors=processors)
    with pytest.raises(EngineError, match="thread of your own"):
        job.result(SOON)


def test_a_job_may_be_awaited_several_times_and_while_it_is_read(engine):
    """Each `await` gives the same result, or raises the job's error."""

    async def main():
        job = engine.submit(PROMPT, max_tokens=20)
        awaited_twice = asyncio.gather(job, job)
        tokens = [token async for event in job for token in event.tokens]
        results = await asyncio.wait_for(awaited_twice, SOON)
        assert len(tokens) == 20
        assert [result.tokens for result in results] == [tokens, tokens]
        assert (await job).tokens == tokens
        failed = engine.submit(PROMPT, logits_processors=[lambda tokens, logits: logits * mx.nan])
        with pytest.raises(SettingsError):
            await asyncio.wait_for(failed, SOON)

    asyncio.run(main())


def test_a_job_cannot_choose_another_target_or_drafter(engine):
    for name in ("target", "drafter"):
        with pytest.raises(SettingsError, match=f"{name} belongs to the engine"):
            engine.submit(PROMPT, **{name: None})


def test_using_an_engine_in_a_forked_process_is_an_error(engine, monkeypatch):
    engine.submit(PROMPT, max_tokens=1).result(SOON)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(EngineError, match="spawn it instead"):
        engine.submit(PROMPT)


def test_an_ended_job_keeps_no_reference_to_its_engine():
    """So a client that still has the job does not prevent a model from being unloaded."""

    def fail():
        raise ValueError("ours")

    engine = dm.Engine(target(), None)
    jobs = [
        engine.submit(PROMPT, max_tokens=4),
        engine.submit(PROMPT, logits_processors=[call_at(len(PROMPT) + 2, fail)]),
    ]
    jobs[0].result(SOON)
    with pytest.raises(ValueError) as caught:
        jobs[1].result(SOON)
    assert "engine's thread" in caught.value.__notes__[0] and "fail" in caught.value.__notes__[0]
    engine.close()
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None and len(jobs) == 2


def test_a_request_whose_caches_cannot_be_released_ends_with_the_error(monkeypatch):
    """When it is preempted. It must not just disappear; other requests continue."""
    engine = SteppedEngine(target(), None, SharedBatch(target(), None))
    jobs = [engine.submit(PROMPT, max_tokens=9) for _ in range(2)]
    engine.scheduler.step()
    release_caches = Request.release_caches

    def failing(request, ahead):
        release_caches(request, ahead)
        raise RuntimeError("ours")

    monkeypatch.setattr(Request, "release_caches", failing)
    engine.scheduler.preempt()
    engine.run()
    assert len(jobs[0].result().tokens) == 9
    with pytest.raises(RuntimeError, match="ours"):
        jobs[1].result()


def test_a_constraint_with_a_mask_of_another_vocabulary_ends_only_its_request():
    class Constraint:
        def __init__(self, size):
            self.size = size

        def follows(self, answer, tokens):
            return len(tokens)

        def allowed(self, answer):
            return np.ones(self.size, bool)

        def __call__(self, tokens, logits):
            return logits

    engine = SteppedEngine(target(), None, SharedBatch(target(), None))
    vocab_size = target().vocab_size
    good = engine.submit(PROMPT, max_tokens=9, logits_processors=lambda: [Constraint(vocab_size)])
    bad = engine.submit(
        PROMPT, max_tokens=9, logits_processors=lambda: [Constraint(vocab_size - 1)]
    )
    engine.scheduler.step()
    with pytest.raises(SettingsError, match="masks of shape"):
        bad.result()
    engine.run()
    assert good.result().tokens == dm.generate(target(), None, PROMPT, max_tokens=9).tokens


PROGRAM_WITHOUT_CLOSE = """
import threading
import dflash_mlx as dm
from tinymodels import target
engine = dm.Engine(target(), None)
job = engine.submit([1, 2, 3], max_tokens=8000)
threading.Thread(target=lambda: print(job.result().finish_reason)).start()
next(job)
print("the program ends")
"""


def test_a_program_that_does_not_close_its_engine_ends():
    result = run_code(PROGRAM_WITHOUT_CLOSE)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split("\n")[0] == "the program ends"
