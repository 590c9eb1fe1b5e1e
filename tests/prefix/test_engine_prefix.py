"""An engine's jobs begin in what others have read: texts as ever, and fewer tokens to read."""

import pytest
from crowd import Played
from families import random_prompt
from tinymodels import random_drafter, target

import dflash_mlx as dm
from dflash_mlx.engine.batch import SharedBatch
from dflash_mlx.errors import SettingsError

CHUNK = 8


def prompt_of(length: int, seed: int) -> list[int]:
    return [token % 192 for token in random_prompt(length, seed)]


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_job_begins_where_another_has_been(family):
    """After one that ended, one that was cancelled, and in the company of others."""
    model, drafter = target(family), random_drafter()
    store = dm.PrefixStore(model, drafter, memory=2**28, chunk=CHUNK)
    shared, settings = prompt_of(40, seed=1), {"max_tokens": 10}
    prompts = [[*shared, *prompt_of(5, seed)] for seed in (2, 3, 4)]
    with dm.Engine(model, drafter, prefix=store) as engine:
        first = engine.submit(prompts[0], **settings).result()
        again = [*prompts[0], *first.tokens, 7]
        jobs = [engine.submit(prompt, **settings) for prompt in [*prompts[1:], again]]
        results = [job.result() for job in jobs]
        cancelled = engine.submit([*prompts[1], 9], max_tokens=2000)
        [next(cancelled) for _ in range(8)]
        cancelled.cancel()
        assert cancelled.result().finish_reason == "cancelled"
        longer = [*prompts[1], 9, *cancelled.result().tokens, 5]
        after = engine.submit(longer, **settings).result()
    for prompt, result in zip([*prompts[1:], again, longer], [*results, after], strict=True):
        assert result.tokens == dm.generate(model, drafter, prompt, **settings).tokens
    assert results[-1].stats.reused_tokens >= len(prompts[0])
    assert after.stats.reused_tokens >= len(prompts[1])
    if family == "qwen3":  # whose caches can be cut at every chunk
        assert [result.stats.reused_tokens for result in results[:2]] == [40, 40]


@pytest.mark.parametrize("cancelled", [False, True])
def test_who_gives_way_goes_on_from_the_store_or_is_cancelled(cancelled):
    model = target()
    store = dm.PrefixStore(model, None, memory=2**28, chunk=CHUNK)
    prompts = [prompt_of(30, seed) for seed in (1, 2)]
    played = Played(model, None, SharedBatch(model, None))
    jobs = [played.submit(prompt, max_tokens=20, prefix=store) for prompt in prompts]
    for _ in range(12):
        played.scheduler.step()
    played.scheduler.preempt()
    jobs[1].cancelled = cancelled
    if not cancelled:
        played.scheduler.step()  # reads 40 of 41 tokens or more at once
        assert played.scheduler._running[-1].request.caches.target_session.position >= 40
    played.run()
    assert jobs[1].result().finish_reason == ("cancelled" if cancelled else "length")
    for job, prompt in zip(jobs[: 1 if cancelled else 2], prompts, strict=False):
        assert job.result().tokens == dm.generate(model, None, prompt, max_tokens=20).tokens


def test_the_store_is_told_what_is_alive():
    model = target()
    store = dm.PrefixStore(model, None, memory=2**28, chunk=CHUNK)
    rooms: list[int] = []
    leave = store.reserve
    store.reserve = lambda size: rooms.append(size) or leave(size)
    with dm.Engine(model, None, prefix=store) as engine:
        for job in [engine.submit(prompt_of(30, seed), max_tokens=4) for seed in range(3)]:
            job.result()
    assert max(rooms) >= model.cache_bytes(256) and max(rooms) % model.cache_bytes(256) == 0


def test_a_conversation_has_its_own_store():
    model = target()
    store = dm.PrefixStore(model, None, memory=2**28, chunk=CHUNK)
    with dm.Engine(model, None, prefix=store) as engine:
        kept = dm.Conversation(model, None)
        assert engine.submit([1, 2], max_tokens=2, conversation=kept).result().tokens
        with pytest.raises(SettingsError, match="give it to the Conversation"):
            engine.submit([1, 2], conversation=kept, prefix=store)
    with pytest.raises(SettingsError, match="prefix"):
        dm.Engine(model, None, prefix=5)
    with pytest.raises(SettingsError, match="prefix must be None or"):
        dm.generate(model, None, [1, 2], prefix=8)
    with pytest.raises(SettingsError, match="of another target or drafter"):
        dm.generate(target("llama"), None, [1, 2], prefix=store)
