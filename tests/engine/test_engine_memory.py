"""The engine's memory: requests wait, are preempted, or are refused if their caches do not fit."""

import pytest
from families import family_target, small_prompt
from request_set import SteppedEngine
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.drafter.protocol import cache_bytes
from dflash_mlx.engine.cache_memory import MemoryBudget
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import NotEnoughMemoryError
from dflash_mlx.generation import GenerationSettings, make_request

SOON = 60  # seconds after which a test fails rather than hangs


def test_requests_wait_until_their_caches_fit_into_memory(request_set):
    """With room for two at a time, all texts are still those of each request alone."""
    drafter = random_drafter()
    size = 2 * (request_set.target.cache_bytes(256) + cache_bytes(drafter, request_set.target, 256))
    engine = SteppedEngine(
        request_set.target, drafter, SharedBatch(request_set.target, None), memory=size
    )
    jobs = request_set.submit_to(engine)
    requests_with_caches = []
    memory = engine.scheduler._memory
    original_overflows = memory.overflows

    def overflows(requests):  # called in each step with all requests that have caches
        requests_with_caches.append(len(requests))
        return original_overflows(requests)

    memory.overflows = overflows
    engine.run()
    assert max(requests_with_caches) == 2
    assert [job.result().tokens for job in jobs] == request_set.alone


def test_the_newest_request_is_preempted_when_memory_is_full_and_continues_later():
    model = target()
    size = target().cache_bytes(256)
    prompts = [small_prompt(230, seed) for seed in (1, 2)]
    alone = [dm.generate(model, None, prompt, max_tokens=40).tokens for prompt in prompts]
    # Each needs one block of 256 rows at first and two at its end; there is room for three.
    engine = SteppedEngine(model, None, SharedBatch(model, None), memory=3 * size, reserve=0)
    jobs = [engine.submit(prompt, max_tokens=40) for prompt in prompts]
    was_preempted = False
    while engine.scheduler.busy:
        engine.scheduler.step()
        if engine.scheduler._waiting and jobs[1].stats.rounds > 0:
            was_preempted = True
    assert was_preempted
    assert [job.result().tokens for job in jobs] == alone


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_the_memory_budget_counts_slots_only_for_layers_that_have_them(family):
    """Four requests of 600 tokens need slots of 1,024 rows and a spare slot, or caches of 768.

    Half of gpt_oss's layers have slots.
    """
    model = family_target(family)
    batch = SharedBatch(model, None)
    layers_with_slots = {"qwen3": 4, "deepseek_v3": 0, "gpt_oss": 2}[family]
    assert len(batch.slot_layers) == layers_with_slots
    caches_with_slots = 4 * model.cache_bytes(768, None, batch.slot_layers)
    other_caches = 4 * model.cache_bytes(768) - caches_with_slots
    slots = caches_with_slots * (5 * 1024) // (4 * 768)  # five of 1,024 rows, not four of 768
    needed = other_caches + slots
    requests = [make_request(model, None, [1] * 600, GenerationSettings()) for _ in range(4)]
    for size, fits in ((needed, True), (needed - 1, False)):
        budget = MemoryBudget(model, None, size, reserve=0, slot_layers=batch.slot_layers)
        assert budget.admits(requests[0], requests[1:]) is fits


def test_a_request_that_can_never_fit_into_memory_is_refused(request_set):
    size = request_set.target.cache_bytes(512)
    with dm.Engine(request_set.target, None, memory=size) as engine:
        assert engine.submit([1] * 400, max_tokens=100).result(SOON).tokens
        with pytest.raises(NotEnoughMemoryError, match="513 tokens.*shorten"):
            engine.submit([1] * 400, max_tokens=113)
