"""Anthropic's messages over a fake engine."""

import json
from pathlib import Path

import pytest
from dialects import MESSAGES, ask
from serving import FakeEngine, client, make_target, post

from dflash_mlx.events import Event

PATH = MESSAGES
REQUESTS = Path(__file__).parents[1] / "data" / "requests"


def stored(name):
    return json.loads((REQUESTS / f"{name}.json").read_text())


def test_the_stop_sequence_is_reported(target):
    engine = FakeEngine(target, ["one", " two three"], reason="length")
    with client(engine) as server:
        assert server.post(PATH, json=ask(PATH)).json()["stop_reason"] == "max_tokens"
    engine = FakeEngine(target, ["one"])
    # What the text stream cut away is in the tokens still.
    tokens = target.tokenizer.encode("one two", add_special_tokens=False)
    engine._events = lambda stats: iter([Event("one", tokens, 0, 0, "stop", stats)])
    answer = post(engine, PATH, ask(PATH, stop_sequences=["x", " two"])).json()
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == " two"
    assert engine.submitted[0][1]["stop"] == ["x", " two"]


def test_count_tokens_equals_usage(target):
    engine = FakeEngine(target)
    body = ask(PATH, system="Be brief.")
    with client(engine) as server:
        asked = body | {"max_tokens": None, "top_p": "not read"}
        counted = server.post(f"{PATH}/count_tokens", json=asked).json()
        read = server.post(PATH, json=body).json()["usage"]["input_tokens"]
    assert counted == {"input_tokens": read}


def test_two_sessions_of_claude_code_share_their_beginning(target):
    engine = FakeEngine(target)
    prompts = []
    with client(engine) as server:
        assert server.head("/").status_code == 200
        for name in ("claude_code_messages", "claude_code_messages_second_session"):
            request = stored(name)
            answer = server.post(request["path"], json=request["body"], headers=request["headers"])
            assert answer.status_code == 200, answer.text
            prompts.append(engine.submitted[-1][0])
            assert "billing" not in engine.prompt()
    first, second = prompts
    same = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    tail = target.tokenizer.decode(first[same:])
    # Tools and system prompt are shared; what follows begins with the user's words.
    assert "hello" in tail and tail.count("word") < target.tokenizer.decode(first).count("word") / 3


REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATES = REFUSES.replace(
    "{% for m in messages %}",
    "{% for m in messages %}"
    "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}",
)
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [REFUSES, ALTERNATES, DROPS])
def test_a_system_message_in_the_middle_is_merged(template):
    target = make_target(template=template)
    engine = FakeEngine(target)
    turns = [
        {"role": "user", "content": "One"},
        {"role": "system", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    answer = post(engine, PATH, ask(PATH, messages=turns, system="Zero"))
    assert answer.status_code == 200, answer.text
    prompt = engine.prompt()
    assert sorted(["Zero", "One", "Two", "Three"], key=prompt.index) == [
        "Zero",
        "One",
        "Two",
        "Three",
    ]
    assert prompt.count("<|im_start|>system") <= 1


def test_a_system_message_in_the_middle_stays_if_the_template_takes_it(target):
    engine = FakeEngine(target)
    turns = [{"role": "user", "content": "One"}, {"role": "system", "content": "Two"}]
    post(engine, PATH, ask(PATH, messages=turns))
    assert "user\nOne<|im_end|>\n<|im_start|>system\nTwo<|im_end|>" in engine.prompt()
