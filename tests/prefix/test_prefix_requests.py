"""The store behind `generate`, `Conversation` and `Engine`: chats, cancelled answers, threads."""

import threading

import pytest
from families import small_prompt
from request_set import SteppedEngine
from tinymodels import random_drafter
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.engine.shared_batch import SharedBatch
from dflash_mlx.errors import SettingsError
from dflash_mlx.prompt import branch_points, encode_prompt

SMALL = 8
SYSTEM = {"role": "system", "content": "user: what is 37 + 48? assistant: It is 85. Thanks!"}


def store_of(target, drafter=None):
    return dm.PrefixStore(target, drafter, memory=2**28, chunk=SMALL)


def ask(text, *before):
    return [*before, {"role": "user", "content": text}]


def test_places_where_other_prompts_part():
    target = tiny_target()
    prompt = ask("1234567890 times", SYSTEM)
    ids = encode_prompt(target, prompt)
    system, answer = branch_points(target, prompt, ids)
    other = encode_prompt(target, ask("over the lazy dog", SYSTEM))
    assert ids[:system] == other[:system] and system > 10
    # The template ends with "assistant:", which the next turn has, but one without an answer not.
    assert target.tokenizer.decode(ids[answer:]).strip() == "assistant:"
    assert branch_points(target, prompt[1:], ids[system:])[:1] != [system]
    assert branch_points(target, "text", ids) == branch_points(target, ids, ids) == []


def test_a_second_chat_begins_after_the_system_prompt():
    """Its windows were marked there, since the messages say where the first chat is its own."""
    target = tiny_target("gpt_oss")
    store = store_of(target)
    ends = []
    for text in ("1234567890 times", "over the lazy dog"):
        prompt = ask(text, SYSTEM)
        ends += branch_points(target, prompt, encode_prompt(target, prompt))[:1]
        result = dm.generate(target, None, prompt, max_tokens=5, prefix=store)
    assert result.stats.reused_tokens == ends[0] > 10
    assert result.tokens == dm.generate(target, None, prompt, max_tokens=5).tokens


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_cancelled_answer_is_stored_as_far_as_it_came(family):
    target = tiny_target(family)
    prompt = small_prompt(20, seed=1)
    store = store_of(target)
    events = dm.stream_generate(target, None, prompt, max_tokens=30, prefix=store)
    tokens = [token for _ in range(15) for token in next(events).tokens]
    events.close()
    again = [*prompt, *tokens, 7, 8]
    result = dm.generate(target, None, again, max_tokens=5, prefix=store)
    assert result.stats.reused_tokens == (34 if family == "gpt_oss" else 35)
    assert result.tokens == dm.generate(target, None, again, max_tokens=5).tokens


def test_a_conversation_goes_on_with_its_own_caches_first():
    target = tiny_target()
    drafter = random_drafter()
    store = store_of(target, drafter)
    prompt = small_prompt(40, seed=2)
    reused = []
    for salt in ("a", "a", "b"):
        chat = dm.Conversation(target, drafter, prefix=store, salt=salt)
        turn = prompt
        for _ in range(2):
            result = dm.generate(target, drafter, turn, max_tokens=9, conversation=chat)
            reused.append(result.stats.reused_tokens)
            turn = [*turn, *result.tokens, 7]
    assert reused == [0, 48, 38, 48, 0, 48]


def test_threads_share_a_store():
    target = tiny_target()
    drafter = random_drafter()
    store = store_of(target, drafter)
    prompts = [small_prompt(60, 3)[:end] for end in (40, 50, 60)]
    alone = [dm.generate(target, drafter, prompt, max_tokens=8).tokens for prompt in prompts]
    texts = {}

    def serve(name):
        made = (dm.generate(target, drafter, p, max_tokens=8, prefix=store) for p in prompts)
        texts[name] = [result.tokens for result in made]

    threads = [threading.Thread(target=serve, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {0: alone, 1: alone}
    stats = dm.generate(target, drafter, prompts[2], max_tokens=1, prefix=store).stats
    assert stats.reused_tokens == 58  # what other threads have computed is used in this one


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_job_begins_where_another_has_been(family):
    """After one that ended, one that was cancelled, and in the company of others."""
    model = tiny_target(family)
    drafter = random_drafter()
    store = store_of(model, drafter)
    shared = small_prompt(40, seed=1)
    settings = {"max_tokens": 10}
    prompts = [[*shared, *small_prompt(5, seed)] for seed in (2, 3, 4)]
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
    model = tiny_target()
    store = store_of(model)
    prompts = [small_prompt(30, seed) for seed in (1, 2)]
    played = SteppedEngine(model, None, SharedBatch(model, None))
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
    """The engine reserves the bytes of the caches of all running requests."""
    model = tiny_target()
    store = store_of(model)
    reserved: list[int] = []
    original_reserve = store.reserve

    def reserve(size: int) -> None:
        reserved.append(size)
        original_reserve(size)

    store.reserve = reserve
    with dm.Engine(model, None, prefix=store) as engine:
        jobs = [engine.submit(small_prompt(30, seed), max_tokens=4) for seed in range(3)]
        for job in jobs:
            job.result()
    assert max(reserved) >= model.cache_bytes(256)
    assert max(reserved) % model.cache_bytes(256) == 0


def test_a_conversation_has_its_own_store():
    model = tiny_target()
    store = store_of(model)
    with dm.Engine(model, None, prefix=store) as engine:
        kept = dm.Conversation(model, None)
        assert engine.submit([1, 2], max_tokens=2, conversation=kept).result().tokens
        with pytest.raises(SettingsError, match="give it to the Conversation"):
            engine.submit([1, 2], conversation=kept, prefix=store)
    with pytest.raises(SettingsError, match="for another target or drafter"):
        dm.generate(tiny_target("llama"), None, [1, 2], prefix=store)
