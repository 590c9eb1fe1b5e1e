"""An engine in the hands of people who have read the first page of its manual."""

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


def acts_at(length: int, act):
    """A logits processor that acts when the text is so long."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) == length:
            act()
        return logits

    return process


class Falsy(Exception):
    """As of an empty list of errors; and no two are told apart, nor hashed."""

    def __len__(self):
        return 0

    def __eq__(self, other):
        return True

    __hash__ = None


def callbacks(raise_):
    """Each place where a caller's function runs, and its settings; they fail some tokens later."""
    end = len(PROMPT) + 4
    yield {"logits_processors": [acts_at(len(PROMPT), raise_)]}
    yield {"logits_processors": [acts_at(end, raise_)]}
    calls = iter(range(end))
    yield {"stop": ["@@"], "stop_applies": lambda *_: next(calls, None) != 4 or raise_()}


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), Falsy("ours"), ValueError("ours"), KeyError("x")]
)
def test_a_callback_s_error_ends_its_own_job_as_it_was_raised(engine, error):
    """Of any class, also one that would end the program in the main thread."""

    def fail():
        raise error

    others = [engine.submit(PROMPT, max_tokens=20) for _ in range(2)]
    for first, second, third in zip(*(callbacks(fail) for _ in range(3)), strict=True):
        jobs = [engine.submit(PROMPT, **settings) for settings in (first, second)]
        alone = partial(dm.generate, target(), None, PROMPT, **third)
        for wait in (*(partial(job.result, SOON) for job in jobs), alone):
            with pytest.raises(type(error)) as caught:
                wait()
            assert caught.value is error
    plain = dm.generate(target(), None, PROMPT, max_tokens=20).tokens
    assert [job.result(SOON).tokens for job in others] == [plain, plain]


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_a_callback_that_stops_iterating_does_not_end_the_text(engine, error):
    def fail():
        raise error("ran out")

    async def read(job):
        return [event async for event in job]

    for settings in callbacks(fail):
        for wait in (list, lambda job: asyncio.run(read(job)), lambda job: job.result(SOON)):
            with pytest.raises(RuntimeError) as caught:
                wait(engine.submit(PROMPT, **settings))
            assert type(caught.value.__cause__) is error
            settings = next(iter(callbacks(fail)))


def test_an_engine_is_closed_by_one_of_its_own_jobs():
    engine = dm.Engine(target(), None)
    job = engine.submit(PROMPT, logits_processors=[acts_at(len(PROMPT) + 3, engine.close)])
    assert job.result(SOON).finish_reason == "cancelled"
    with pytest.raises(EngineError, match="closed"):
        engine.submit(PROMPT)


def test_a_job_is_submitted_by_another_one_s_processor(engine):
    submitted = []

    def ask():
        submitted.append(engine.submit(PROMPT, max_tokens=3))

    engine.submit(PROMPT, max_tokens=9, logits_processors=[acts_at(len(PROMPT), ask)]).result(SOON)
    assert len(submitted[0].result(SOON).tokens) == 3


@pytest.mark.parametrize("wait", [next, dm.Job.result, lambda job: job.result(SOON)])
def test_nobody_waits_for_a_job_in_the_thread_that_makes_it(engine, wait):
    """It would be for ever, and all others with it."""

    def ask():
        wait(engine.submit(PROMPT, max_tokens=2))

    job = engine.submit(PROMPT, max_tokens=5, logits_processors=[acts_at(len(PROMPT), ask)])
    with pytest.raises(EngineError, match="thread of your own"):
        job.result(SOON)


def test_a_job_is_awaited_beside_its_readers(engine):
    """Each time the same, and what it raises is raised."""

    async def main():
        job = engine.submit(PROMPT, max_tokens=20)
        twice = asyncio.gather(job, job)
        read = [token async for event in job for token in event.tokens]
        results = await asyncio.wait_for(twice, SOON)
        assert [result.tokens for result in results] == [read, read] and len(read) == 20
        assert (await job).tokens == read
        failed = engine.submit(PROMPT, logits_processors=[lambda tokens, logits: logits * mx.nan])
        with pytest.raises(SettingsError):
            await asyncio.wait_for(failed, SOON)

    asyncio.run(main())


def test_what_is_the_engine_s_is_no_setting_of_a_job(engine):
    for name in ("target", "drafter"):
        with pytest.raises(SettingsError, match=f"{name} is the engine's"):
            engine.submit(PROMPT, **{name: None})


def test_a_forked_process_is_told_that_it_has_no_engine(engine, monkeypatch):
    engine.submit(PROMPT, max_tokens=1).result(SOON)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(EngineError, match="spawn it instead"):
        engine.submit(PROMPT)


def test_a_job_that_has_ended_holds_nothing_of_its_engine():
    """A client that has stopped reading does not keep a model from being unloaded."""

    def fail():
        raise ValueError("ours")

    engine = dm.Engine(target(), None)
    jobs = [
        engine.submit(PROMPT, max_tokens=4),
        engine.submit(PROMPT, logits_processors=[acts_at(len(PROMPT) + 2, fail)]),
    ]
    jobs[0].result(SOON)
    with pytest.raises(ValueError) as caught:
        jobs[1].result(SOON)
    assert "engine's thread" in caught.value.__notes__[0] and "fail" in caught.value.__notes__[0]
    engine.close()
    held = weakref.ref(engine)
    del engine
    gc.collect()
    assert held() is None and len(jobs) == 2


def test_no_request_is_lost_that_cannot_give_its_caches_back(monkeypatch):
    played = SteppedEngine(target(), None, SharedBatch(target(), None))
    jobs = [played.submit(PROMPT, max_tokens=9) for _ in range(2)]
    played.scheduler.step()
    release_caches = Request.release_caches

    def failing(request, ahead):
        release_caches(request, ahead)
        raise RuntimeError("ours")

    monkeypatch.setattr(Request, "release_caches", failing)
    played.scheduler.preempt()
    played.run()
    assert len(jobs[0].result().tokens) == 9
    with pytest.raises(RuntimeError, match="ours"):
        jobs[1].result()


def test_a_mask_of_another_vocabulary_ends_its_own_request_alone():
    class Constraint:
        def __init__(self, size):
            self.size = size

        def follows(self, answer, tokens):
            return len(tokens)

        def allowed(self, answer):
            return np.ones(self.size, bool)

        def __call__(self, tokens, logits):
            return logits

    played = SteppedEngine(target(), None, SharedBatch(target(), None))
    sizes = played.pair[0].vocab_size, played.pair[0].vocab_size - 1
    good, bad = (
        played.submit(PROMPT, max_tokens=9, logits_processors=partial(list, [Constraint(size)]))
        for size in sizes
    )
    played.scheduler.step()
    with pytest.raises(SettingsError, match="masks of shape"):
        bad.result()
    played.run()
    assert good.result().tokens == dm.generate(target(), None, PROMPT, max_tokens=9).tokens


FORGOTTEN = """
import threading
import dflash_mlx as dm
from tinymodels import target
engine = dm.Engine(target(), None)
job = engine.submit([1, 2, 3], max_tokens=8000)
threading.Thread(target=lambda: print(job.result().finish_reason)).start()
next(job)
print("the program ends")
"""


def test_a_program_ends_that_forgot_to_close_its_engine():
    done = run_code(FORGOTTEN)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "the program ends"
