"""Anthropic's messages and Ollama's API over a fake engine."""

import json
from pathlib import Path

import pytest
from dialects import GENERATE, HI, MESSAGES, OLLAMA, ask, user
from packaging.version import Version
from serving import FakeEngine, client, make_target, post

from dflash_mlx.events import Event
from dflash_mlx.serve.ollama import OllamaChatBody

REQUESTS = Path(__file__).parents[1] / "data" / "requests"


def test_the_stop_sequence_is_reported(target):
    engine = FakeEngine(target, ["one", " two three"], reason="length")
    assert post(engine, MESSAGES, ask(MESSAGES)).json()["stop_reason"] == "max_tokens"
    # The tokens still have the stop string, which was cut from the text.
    tokens = target.tokenizer.encode("one two", add_special_tokens=False)
    engine._events = lambda stats: iter(
        [Event("one", tokens=tokens, accepted=0, drafted=0, finish_reason="stop", stats=stats)]
    )
    answer = post(engine, MESSAGES, ask(MESSAGES, stop_sequences=["x", " two"])).json()
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == " two"
    assert engine.submitted[-1][1]["stop"] == ["x", " two"]


def test_count_tokens_equals_usage(engine):
    """Fields that do not matter for the count are not checked."""
    body = ask(MESSAGES, system="Be brief.")
    request = body | {"max_tokens": None, "top_p": "not read"}
    counted = post(engine, f"{MESSAGES}/count_tokens", request).json()
    read = post(engine, MESSAGES, body).json()["usage"]["input_tokens"]
    assert counted == {"input_tokens": read}


def test_two_sessions_of_claude_code_share_their_beginning(engine):
    with client(engine) as server:
        assert server.head("/").status_code == 200
        for name in ("claude_code_messages", "claude_code_messages_second_session"):
            request = json.loads((REQUESTS / f"{name}.json").read_text())
            answer = server.post(request["path"], json=request["body"], headers=request["headers"])
            assert answer.status_code == 200, answer.text
            assert "billing" not in engine.prompt()
    (first, _), (second, _) = engine.submitted
    shared = 0
    while first[shared] == second[shared]:
        shared += 1
    whole = engine.target.tokenizer.decode(first)
    tail = engine.target.tokenizer.decode(first[shared:])
    # Tools and the system prompt are shared, but not the user's words.
    assert "hello" in tail and tail.count("word") < whole.count("word") / 3


# Templates that refuse a later system message, one of which also refuses two turns of a role in a
# row, and a template that drops a later system message.
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
TURNS = [user("One"), {"role": "system", "content": "Two"}, user("Three")]


@pytest.mark.parametrize("template", [REFUSES, ALTERNATES, DROPS])
def test_a_system_message_in_the_middle_is_merged(template):
    engine = FakeEngine(make_target(template=template))
    answer = post(engine, MESSAGES, ask(MESSAGES, *TURNS, system="Zero"))
    assert answer.status_code == 200, answer.text
    places = [engine.prompt().index(word) for word in ("Zero", "One", "Two", "Three")]
    assert places == sorted(places)
    assert engine.prompt().count("<|im_start|>system") <= 1


def test_a_system_message_in_the_middle_stays_if_the_template_takes_it(engine):
    post(engine, MESSAGES, ask(MESSAGES, *TURNS[:2]))
    assert "user\nOne<|im_end|>\n<|im_start|>system\nTwo<|im_end|>" in engine.prompt()


@pytest.fixture
def thinking():
    """An engine whose answer has a thought."""
    return FakeEngine(make_target("json_tools", thinking="<think>\n"), ["Hm</think>", "Yes", "."])


def lines(answer):
    """The objects of an answer that has one in each line."""
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_ollamas_generated_stream_adds_up_to_the_whole_answer(thinking):
    """Ollama streams unless it is told not to."""
    *pieces, end = lines(post(thinking, GENERATE, ask(GENERATE)))
    whole = post(thinking, GENERATE, ask(GENERATE, stream=False)).json()
    assert not any(piece["done"] for piece in pieces) and end["done"] and whole["done"]
    for name, text in (("thinking", "Hm"), ("response", "Yes.")):
        assert whole[name] == "".join(piece.get(name, "") for piece in pieces) == text
    for last in (end, whole):
        assert last["model"] == "fake" and last["done_reason"] == "stop"
        assert last["eval_count"] > 3 and last["total_duration"] > last["load_duration"] > 0
        assert {"prompt_eval_duration", "eval_duration", "created_at"} <= set(last)


def test_ollamas_results_are_matched_to_tools_by_name(thinking):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    tool = {"type": "function", "function": {"name": "f"}}
    result = {"role": "tool", "tool_name": "f", "content": "42"}
    post(thinking, OLLAMA, ask(OLLAMA, *HI, call, result, tools=[tool]))
    assert '[f {"a": 1}]' in thinking.prompt() and "tool\n42" in thinking.prompt()


def test_ollamas_raw_prompt_is_continued(thinking):
    pieces = lines(post(thinking, GENERATE, ask(GENERATE, raw=True)))
    assert "".join(piece["response"] for piece in pieces) == "Hm</think>Yes."
    assert thinking.prompt().endswith("Hi") and len(thinking.submitted[0][0]) < 9
    post(thinking, GENERATE, ask(GENERATE, system="Be brief."))
    assert "system\nBe brief." in thinking.prompt()


def test_a_request_without_a_prompt_loads_the_model(engine):
    for path, prompt in ((OLLAMA, {"messages": []}), (GENERATE, {"prompt": ""})):
        answer = post(engine, path, {"model": "m", **prompt}).json()
        assert answer["done"] and answer["done_reason"] == "load"
    assert not engine.submitted


def test_a_pull_of_the_served_model_succeeds(engine):
    """Codex pulls a model that is not listed under exactly its name."""
    for body in ({"model": "fake"}, {"name": "fake:latest"}):
        answer = post(engine, "/api/pull", body)
        assert lines(answer) == [{"status": "pulling manifest"}, {"status": "success"}]
        whole = post(engine, "/api/pull", body | {"stream": False}).json()
        assert whole == {"status": "success"}


@pytest.mark.parametrize(
    ("keep_alive", "unloads"),
    [
        *((time, True) for time in (0, 0.0, "0", "0s", "0m", "0h", "-0s", "0h0m0s")),
        *((time, True) for time in (0.1, "10ms", "0.5s", "999999us")),
        *((time, False) for time in (None, -1, 5, "1000ms", "5m", "1h30m", "-1", "-1m", "x")),
    ],
)
def test_a_keep_alive_below_a_second_unloads_the_model(keep_alive, unloads):
    body = OllamaChatBody(model="m", keep_alive=keep_alive)
    assert body.unloads == unloads


def test_lists_of_models_have_what_clients_look_for(thinking):
    """The clients of Ollama, LM Studio and llama.cpp."""
    length = thinking.target.context_length
    with client(thinking) as server:
        for path in ("/api/tags", "/api/ps"):
            [model] = server.get(path).json()["models"]
            assert model["name"] == model["model"] == "fake" and model["size"] == 2 * 4 * 4
            assert model["details"]["quantization_level"] == "4-bit"
        details = server.post("/api/show", json={"model": "fake"}).json()
        assert server.post("/api/show", json={"name": "fake"}).json() == details
        assert server.post("/api/show", json={}).status_code == 400
        assert details["capabilities"] == ["completion", "tools", "thinking"]
        assert details["model_info"]["llama.context_length"] == length
        version = Version(server.get("/api/version").json()["version"])
        assert version >= Version("0.13.4")  # what Codex requires; VS Code requires less
        [listed] = server.get("/v1/models").json()["data"]
        assert (listed["state"], listed["max_context_length"]) == ("loaded", length)
        for path in ("/api/embed", "/v1/embeddings"):
            answer = server.post(path, json={})
            assert answer.status_code == 404 and "makes no embeddings" in answer.text
