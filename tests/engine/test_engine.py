"""The engine: jobs from any thread, errors of one, cancelled ones, and what is left of them."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from families import family_target, small_prompt
from request_set import RequestSet, SteppedEngine
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.drafter.protocol import cache_bytes
from dflash_mlx.engine.cache_memory import MemoryBudget
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import (
    EngineError,
    NotEnoughMemoryError,
    ProposalError,
    SettingsError,
    UnsupportedTreeError,
)
from dflash_mlx.generation import GenerationSettings, make_request

LENGTH = 24
SOON = 60  # seconds after which a test fails rather than hangs
WAYS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 5}, {"presence_penalty": 0.4})


@pytest.fixture(scope="module")
def crowd() -> RequestSet:
    """Six requests of several kinds on one small target."""
    requests = [
        (small_prompt(4 + 5 * number, number), {"max_tokens": LENGTH, **WAYS[number % len(WAYS)]})
        for number in range(6)
    ]
    return RequestSet(target(), requests)


def submit_all(engine: Any, crowd: RequestSet, **further: Any) -> list[dm.Job]:
    return [engine.submit(prompt, **{**ways, **further}) for prompt, ways in crowd.requests]


def test_jobs_from_many_threads(crowd):
    with dm.Engine(crowd.target, crowd.oracle(0.8)) as engine, ThreadPoolExecutor(6) as pool:
        jobs = pool.map(lambda request: engine.submit(request[0], **request[1]), crowd.requests)
        for job, alone in zip(jobs, crowd.alone, strict=True):
            events = list(job)
            assert [token for event in events for token in event.tokens] == alone
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
            result = job.result(SOON)
            assert result.tokens == alone and result.finish_reason == "length"
            assert result.text == "".join(event.text for event in events)
            assert result.stats.output_tokens == LENGTH and job.done


def test_async_readers_side_by_side(crowd):
    async def read(job: dm.Job) -> list[int]:
        return [token async for event in job for token in event.tokens]

    async def main(engine: dm.Engine) -> list[list[int]]:
        silent = asyncio.create_task(anext(submit_all(engine, crowd)[0], None))
        silent.cancel()  # whoever gives up waiting is no trouble
        return await asyncio.gather(*(read(job) for job in submit_all(engine, crowd)))

    with dm.Engine(crowd.target, crowd.oracle(0.8)) as engine:
        assert asyncio.run(main(engine)) == crowd.alone


def test_a_conversation_continues_from_its_caches(crowd):
    kept = dm.Conversation(crowd.target, None)
    with dm.Engine(crowd.target, None) as engine:
        job = engine.submit([1, 2, 3], max_tokens=8, conversation=kept)
        with pytest.raises(SettingsError, match="has not ended"):
            engine.submit([1, 2, 3], conversation=kept)
        again = [1, 2, 3, *job.result(SOON).tokens, 4]
        second = engine.submit(again, max_tokens=5, conversation=kept)
        beside = engine.submit(again, max_tokens=5)
        assert second.result(SOON).tokens == beside.result(SOON).tokens
        assert second.stats.reused_tokens == len(again) - 2


# What is refused, and what fails


def test_a_closed_engine_takes_nothing(crowd):
    engine = dm.Engine(crowd.target, None)
    job = engine.submit([1, 2], max_tokens=4000)
    next(job)
    engine.close()
    assert job.result(SOON).finish_reason == "cancelled" and job.result(SOON).tokens
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1, 2])
    engine.close()


def failing_processor(after: int) -> Callable[[mx.array, mx.array], mx.array]:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > after:
            raise ZeroDivisionError("the grammar is broken")
        return logits

    return process


def nan(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits * mx.nan


TOO_WIDE = small_prompt(9, 77)
BRANCHES = small_prompt(9, 78)


class Wrong:
    """Proposes more rows than it is asked for after one prompt, and a tree after another."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.tap_layers = drafter.tap_layers

    def start(self, target, sampler):
        session = self.drafter.start(target, sampler)
        propose = session.propose

        def wrong(anchor: int, width: int) -> dm.Proposal:
            begins = session.tokens[: len(TOO_WIDE)]
            if begins == TOO_WIDE:
                return dm.Proposal([anchor] * (width + 1))
            is_tree = begins == BRANCHES and width > 2
            return dm.Proposal([anchor, 1, 2], (-1, 0, 0)) if is_tree else propose(anchor, width)

        session.propose = wrong
        return session


def test_an_error_fails_only_its_own_job(crowd, monkeypatch):
    """In every step of its own: drafting, choosing, and what is read."""
    monkeypatch.setattr(crowd.target, "why_no_trees", "states")
    broken = [
        ({"logits_processors": [failing_processor(9)]}, ZeroDivisionError),
        ({"logits_processors": [nan]}, SettingsError),
        ({"prompt": TOO_WIDE}, ProposalError),
        ({"prompt": BRANCHES}, UnsupportedTreeError),
    ]
    drafter = Wrong(crowd.oracle(0.8))
    drafter.drafter.texts += [
        *([*prompt, 1] for prompt in (TOO_WIDE, BRANCHES)),
        *([1, 2, 3, 4, 5, 6, *[n] * 30] for n in range(192)),
    ]
    with dm.Engine(crowd.target, drafter) as engine:
        jobs = submit_all(engine, crowd)
        failing = []
        for settings, kind in broken:
            prompt = settings.pop("prompt", crowd.requests[0][0])
            failing.append((engine.submit(prompt, **settings), kind))
        for job, kind in failing:
            with pytest.raises(kind):
                list(job)
            with pytest.raises(kind):
                job.result(SOON)
        assert [job.result(SOON).tokens for job in jobs] == crowd.alone


class Breaking(SharedBatch):
    """A forward that breaks off, its caches half written, whenever `fails` says so of its turns."""

    def __init__(
        self, target: dm.Target, error: Exception, fails: Callable[[list[list[int]]], bool]
    ) -> None:
        super().__init__(target, None)
        self.error = error
        self.fails = fails
        self.broken = 0

    def verify(self, turns, tokens=None):
        answers = super().verify(turns, tokens)
        if self.fails([turn.request.caches.draft_session.tokens for turn in turns]):
            self.broken += 1
            raise self.error
        return answers


NO_MEMORY = NotEnoughMemoryError("The device has no memory left.")


def play_broken(
    crowd: RequestSet, error: Exception, fails: Callable[[list[list[int]]], bool]
) -> tuple[list[dm.Job], Breaking]:
    together = Breaking(crowd.target, error, fails)
    played = SteppedEngine(crowd.target, crowd.oracle(0.8), together)
    jobs = submit_all(played, crowd)
    played.run()
    return jobs, together


def test_a_forward_without_memory_fails_only_whom_it_must(crowd):
    bad = crowd.requests[2][0]

    def of_the_bad(texts: list[list[int]]) -> bool:
        return any(text[: len(bad)] == bad and len(text) > len(bad) + 8 for text in texts)

    jobs, together = play_broken(crowd, NO_MEMORY, of_the_bad)
    with pytest.raises(NotEnoughMemoryError, match="no memory left"):
        jobs.pop(2).result()
    assert [job.result().tokens for job in jobs] == [*crowd.alone[:2], *crowd.alone[3:]]
    assert together.broken == 2  # with the others, and alone


def test_a_forward_of_many_without_memory_fails_nobody(crowd):
    breaks = iter([False] * 3 + [True] * 3 + [False] * 10**4)
    jobs, together = play_broken(crowd, NO_MEMORY, lambda texts: len(texts) > 1 and next(breaks))
    assert [job.result().tokens for job in jobs] == crowd.alone and together.broken == 3


def test_memory_that_runs_out_as_a_shared_step_starts_fails_nobody(crowd, monkeypatch):
    """MLX allocates when it starts to compute, not only where a step waits."""
    async_eval = mx.async_eval
    breaks = iter([False, True, True, False, True] + [False] * 10**4)

    def full(*arrays: object) -> None:
        monkeypatch.setattr(mx, "async_eval", async_eval)
        raise RuntimeError("[metal::malloc] Unable to allocate 4096 bytes.")

    class Full(SharedBatch):
        def verify(self, turns, tokens=None):
            answers = super().verify(turns, tokens)
            if len(turns) > 1 and next(breaks):
                monkeypatch.setattr(mx, "async_eval", full)
            return answers

    played = SteppedEngine(crowd.target, None, Full(crowd.target, None))
    jobs = submit_all(played, crowd)
    played.run()
    assert [job.result().tokens for job in jobs] == crowd.alone
    assert not any(breaks)


def test_a_forward_that_breaks_ends_all_in_it(crowd):
    """Nobody guesses whose fault it is, and a bug of ours is not hidden by a second try."""
    breaks = iter([False, True])
    jobs, _ = play_broken(crowd, RuntimeError("the device was lost"), lambda texts: next(breaks))
    for job in jobs:
        with pytest.raises(RuntimeError, match="device was lost"):
            job.result()


def test_a_request_that_joins_pipelined_steps_breaks_no_forward(crowd):
    """A new request's step has a forward of its own; the next pipelined one is for all of them."""
    rows: list[tuple[int, int]] = []

    class Counting(SharedBatch):
        def verify(self, turns, tokens=None):
            logits, taps = super().verify(turns, tokens)
            rows.append((len(turns), len(logits)))
            return logits, taps

    played = SteppedEngine(crowd.target, None, Counting(crowd.target, None))
    plain = [
        index for index, (_, ways) in enumerate(crowd.requests) if "presence_penalty" not in ways
    ]
    jobs = []
    for number in plain:
        prompt, ways = crowd.requests[number]
        jobs.append(played.submit(prompt, **ways))
        for _ in range(4):
            played.scheduler.step()
    assert not any(job.done for job in jobs)
    assert rows[-1] == (len(plain), len(plain))
    played.run()
    assert [job.result().tokens for job in jobs] == [crowd.alone[number] for number in plain]


def test_prompts_end_in_one_forward(crowd):
    """Also a long one's end; one without memory costs nobody anything."""
    ends: list[int] = []

    class Reading(SharedBatch):
        def read(self, together):
            ends.append(len(together))
            read = super().read(together)
            if len(together) == 7:
                raise NO_MEMORY
            return read

    long = small_prompt(3 * 64 + 5, 9), {"max_tokens": 9}
    for each in (crowd, RequestSet(crowd.target, [*crowd.requests, long])):
        ends.clear()
        played = SteppedEngine(each.target, each.oracle(0.8), Reading(each.target, None))
        jobs = submit_all(played, each)
        played.run()
        assert [job.result().tokens for job in jobs] == each.alone
        assert max(ends) == len(jobs)


# Who leaves, and what is left


def test_a_cancelled_job_is_freed_by_the_next_step(crowd):
    played = SteppedEngine(crowd.target, crowd.oracle(0.0), SharedBatch(crowd.target, None))
    jobs = submit_all(played, crowd)
    for _ in range(4):
        played.scheduler.step()
    gone = weakref.ref(played.scheduler._running[1].request)
    rounds = jobs[1].stats.rounds
    jobs[1].cancel()
    played.scheduler.step()
    assert jobs[1].result().finish_reason == "cancelled" and jobs[1].stats.rounds == rounds
    assert gone() is None and len(played.scheduler._running) == len(jobs) - 1
    played.run()
    assert jobs[1].result().tokens == crowd.alone[1][: rounds + 1]
    assert [job.result().tokens for job in jobs[2:]] == crowd.alone[2:]


def test_room_for_two_is_enough_for_all(crowd):
    """No more than fit are ever let in, and every text is what it was."""
    drafter = random_drafter()
    size = 2 * (crowd.target.cache_bytes(256) + cache_bytes(drafter, crowd.target, 256))
    played = SteppedEngine(crowd.target, drafter, SharedBatch(crowd.target, None), memory=size)
    jobs = submit_all(played, crowd)
    held = []
    memory = played.scheduler._memory
    overflows = memory.overflows  # asked in every step, of all who have read anything
    memory.overflows = lambda requests: held.append(len(requests)) or overflows(requests)
    played.run()
    assert max(held) == 2 and [job.result().tokens for job in jobs] == crowd.alone


def test_the_youngest_gives_way_and_goes_on():
    model = target()
    size = target().cache_bytes(256)
    prompts = [small_prompt(230, seed) for seed in (1, 2)]
    alone = [dm.generate(model, None, prompt, max_tokens=40).tokens for prompt in prompts]
    # Each needs one block now, so both enter, and two at the end.
    played = SteppedEngine(model, None, SharedBatch(model, None), memory=3 * size, reserve=0)
    jobs = [played.submit(prompt, max_tokens=40) for prompt in prompts]
    waited = False
    while played.scheduler.busy:
        played.scheduler.step()
        waited |= bool(played.scheduler._waiting) and jobs[1].stats.rounds > 0
    assert waited and [job.result().tokens for job in jobs] == alone


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_slots_are_counted_for_the_layers_that_have_them(family):
    """Four of 600 tokens: slots of 1,024 rows and a spare one, caches of 768; gpt_oss has both."""
    model = family_target(family)
    batch = SharedBatch(model, None)
    slots = {"qwen3": 4, "deepseek_v3": 0, "gpt_oss": 2}[family]
    assert len(batch.slot_layers) == slots
    in_slots = 4 * model.cache_bytes(768, None, batch.slot_layers)
    others = 4 * model.cache_bytes(768) - in_slots
    needed = others + in_slots * 1024 * 5 // (768 * 4)
    requests = [make_request(model, None, [1] * 600, GenerationSettings()) for _ in range(4)]
    for size, fits in ((needed, True), (needed - 1, False)):
        budget = MemoryBudget(model, None, size, reserve=0, slot_layers=batch.slot_layers)
        assert budget.admits(requests[0], requests[1:]) is fits


def test_what_can_never_fit_is_refused(crowd):
    size = crowd.target.cache_bytes(512)
    with dm.Engine(crowd.target, None, memory=size) as engine:
        assert engine.submit([1] * 400, max_tokens=100).result(SOON).tokens
        with pytest.raises(NotEnoughMemoryError, match="513 tokens.*shorten"):
            engine.submit([1] * 400, max_tokens=113)


def test_hundreds_of_jobs_leave_nothing(crowd):
    """Finished, cancelled and failed ones; what is counted comes back to what it was."""

    def some(engine: dm.Engine, count: int) -> None:
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

    def counted() -> tuple[int, int]:
        gc.collect()
        return mx.get_active_memory(), len(gc.get_objects())

    with dm.Engine(crowd.target, random_drafter()) as engine:
        some(engine, 50)
        before = counted()
        some(engine, 150)
        engine.submit([1], max_tokens=1).result(SOON)
        after = counted()
    assert after[0] <= before[0] + 2**20 and after[1] <= before[1] + 200
