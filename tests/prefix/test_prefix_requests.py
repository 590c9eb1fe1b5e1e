"""Prefix stores used by `generate`, `Conversation` and `Engine`: chats, cancelling, threads."""

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


def messages_of(text, *before):
    return [*before, {"role": "user", "content": text}]


def test_branch_points_are_the_ends_of_the_system_prompt_and_of_the_question():
    """Other chats branch there. A prompt that is not of messages has no branch points."""
    target = tiny_target()
    prompt = messages_of("1234567890 times", SYSTEM)
    ids = encode_prompt(target, prompt)
    system, answer = branch_points(target, prompt, ids)
    other = encode_prompt(target, messages_of("over the lazy dog", SYSTEM))
    assert ids[:system] == other[:system] and system > 10
    # The template adds "assistant:", which a prompt without an answer does not have.
    assert target.tokenizer.decode(ids[answer:]).strip() == "assistant:"
    assert branch_points(target, prompt[1:], ids[system:])[:1] != [system]
    assert branch_points(target, "text", ids) == branch_points(target, ids, ids) == []


def test_a_second_chat_continues_from_the_system_prompt():
    """The messages tell where it ends, so the first chat made a checkpoint there."""
    target = tiny_target("gpt_oss")
    store = store_of(target)
    ends = []
    for text in ("1234567890 times", "over the lazy dog"):
        prompt = messages_of(text, SYSTEM)
        ends += branch_points(target, prompt, encode_prompt(target, prompt))[:1]
        result = dm.generate(target, None, prompt, max_tokens=5, prefix=store)
    assert result.stats.reused_tokens == ends[0] > 10
    assert result.tokens == dm.generate(target, None, prompt, max_tokens=5).tokens


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_the_tokens_of_a_cancelled_answer_are_stored(family):
    target = tiny_target(family)
    prompt = small_prompt(20, seed=1)
    store = store_of(target)
    events = dm.stream_generate(target, None, prompt, max_tokens=30, prefix=store)
    tokens = [token for _ in range(15) for token in next(events).tokens]
    events.close()
    again = [*prompt, *tokens, 7, 8]
    result = dm.generate(target, None, again, max_tokens=5, prefix=store)
    # Of 20 + 15 tokens. A pipelined step of qwen3 has read the last one as well.
    assert result.stats.reused_tokens == (34 if family == "gpt_oss" else 35)
    assert result.tokens == dm.generate(target, None, again, max_tokens=5).tokens


def test_a_conversation_uses_its_caches_and_its_first_turn_uses_the_store():
    """Two turns with salt "a", two with the same salt again, and two with another salt."""
    target = tiny_target()
    drafter = random_drafter()
    store = store_of(target, drafter)
    prompt = small_prompt(40, seed=2)
    reused = []
    for salt in ("a", "a", "b"):
        conversation = dm.Conversation(target, drafter, prefix=store, salt=salt)
        turn = prompt
        for _ in range(2):
            result = dm.generate(target, drafter, turn, max_tokens=9, conversation=conversation)
            reused.append(result.stats.reused_tokens)
            turn = [*turn, *result.tokens, 7]
    # A first turn reads the last two of 40 tokens, and a second one the last of 40 + 9.
    assert reused == [0, 48, 38, 48, 0, 48]


def test_threads_that_share_a_store_get_the_right_texts():
    """And each thread's prefixes are found by the others."""
    target = tiny_target()
    drafter = random_drafter()
    store = store_of(target, drafter)
    prompts = [small_prompt(60, 3)[:end] for end in (40, 50, 60)]
    alone = [dm.generate(target, drafter, prompt, max_tokens=8).tokens for prompt in prompts]
    texts = {}

    def generate_all(number):
        results = [
            dm.generate(target, drafter, prompt, max_tokens=8, prefix=store) for prompt in prompts
        ]
        texts[number] = [result.tokens for result in results]

    threads = [threading.Thread(target=generate_all, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {0: alone, 1: alone}
    stats = dm.generate(target, drafter, prompts[2], max_tokens=1, prefix=store).stats
    assert stats.reused_tokens == 60 - 2  # the last two tokens of a prompt are always read


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_job_continues_from_the_prefixes_of_earlier_jobs(family):
    """Of a job that ended, and of a cancelled one; also while other jobs run."""
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
        for _ in range(8):
            next(cancelled)
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
def test_a_preempted_job_continues_from_the_store_or_is_cancelled(cancelled):
    model = tiny_target()
    store = store_of(model)
    prompts = [small_prompt(30, seed) for seed in (1, 2)]
    engine = SteppedEngine(model, None, SharedBatch(model, None))
    jobs = [engine.submit(prompt, max_tokens=20, prefix=store) for prompt in prompts]
    for _ in range(12):
        engine.scheduler.step()
    engine.scheduler.preempt()
    jobs[1].cancelled = cancelled
    if not cancelled:
        engine.scheduler.step()  # reads 40 of 41 tokens or more at once
        assert engine.scheduler._running[-1].request.caches.target_session.position >= 40
    engine.run()
    assert jobs[1].result().finish_reason == ("cancelled" if cancelled else "length")
    for job, prompt in zip(jobs[: 1 if cancelled else 2], prompts, strict=False):
        assert job.result().tokens == dm.generate(model, None, prompt, max_tokens=20).tokens


def test_the_engine_reserves_memory_of_the_store_for_the_caches_of_running_requests():
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


def test_a_store_given_together_with_a_conversation_is_refused():
    """A conversation has its store already. A store of another target is refused as well."""
    model = tiny_target()
    store = store_of(model)
    with dm.Engine(model, None, prefix=store) as engine:
        conversation = dm.Conversation(model, None)
        assert engine.submit([1, 2], max_tokens=2, conversation=conversation).result().tokens
        with pytest.raises(SettingsError, match="give it to the Conversation"):
            engine.submit([1, 2], conversation=conversation, prefix=store)
    with pytest.raises(SettingsError, match="for another target or drafter"):
        dm.generate(tiny_target("llama"), None, [1, 2], prefix=store)
