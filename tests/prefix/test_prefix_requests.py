"""The store behind `generate` and `Conversation`: chats, cancelled answers, threads, settings."""

import threading

import pytest
from test_conversation import small_prompt
from tinymodels import random_drafter
from tinymodels import target as tiny_target

import dflash_mlx as dm
from dflash_mlx.prompt import branch_points, encode_prompt

SMALL = 8
SYSTEM = {"role": "system", "content": "user: what is 37 + 48? assistant: It is 85. Thanks!"}


def store_of(target, drafter=None):
    return dm.PrefixStore(target, drafter, memory=2**28, chunk=SMALL)


def ask(text, *before):
    return [*before, {"role": "user", "content": text}]


def test_places_where_other_prompts_part():
    target, prompt = tiny_target(), ask("1234567890 times", SYSTEM)
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
    target, prompt = tiny_target(family), small_prompt(20, seed=1)
    store = store_of(target)
    events = dm.stream_generate(target, None, prompt, max_tokens=30, prefix=store)
    tokens = [token for _ in range(15) for token in next(events).tokens]
    events.close()
    again = [*prompt, *tokens, 7, 8]
    result = dm.generate(target, None, again, max_tokens=5, prefix=store)
    assert result.stats.reused_tokens == (34 if family == "gpt_oss" else 35)
    assert result.tokens == dm.generate(target, None, again, max_tokens=5).tokens


def test_a_conversation_goes_on_with_its_own_caches_first():
    target, drafter = tiny_target(), random_drafter()
    store, prompt, reused = store_of(target, drafter), small_prompt(40, seed=2), []
    for salt in ("a", "a", "b"):
        chat = dm.Conversation(target, drafter, prefix=store, salt=salt)
        turn = prompt
        for _ in range(2):
            result = dm.generate(target, drafter, turn, max_tokens=9, conversation=chat)
            reused.append(result.stats.reused_tokens)
            turn = [*turn, *result.tokens, 7]
    assert reused == [0, 48, 38, 48, 0, 48]


def test_threads_share_a_store():
    target, drafter = tiny_target(), random_drafter()
    store, prompts = store_of(target, drafter), [small_prompt(60, 3)[:end] for end in (40, 50, 60)]
    alone = [dm.generate(target, drafter, prompt, max_tokens=8).tokens for prompt in prompts]
    found = {}

    def serve(name):
        made = (dm.generate(target, drafter, p, max_tokens=8, prefix=store) for p in prompts)
        found[name] = [result.tokens for result in made]

    threads = [threading.Thread(target=serve, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: alone, 1: alone}
    stats = dm.generate(target, drafter, prompts[2], max_tokens=1, prefix=store).stats
    assert stats.reused_tokens == 58  # what other threads have computed is used in this one
