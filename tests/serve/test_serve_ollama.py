"""Ollama's API over a fake engine."""

import json

import pytest
from dialects import GENERATE, ask, user
from dialects import OLLAMA as CHAT
from mlx_lm.tool_parsers import json_tools
from packaging.version import Version
from serving import FakeEngine, client, make_target, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def target():
    return make_target(json_tools, thinking="<think>\n")


@pytest.fixture
def engine(target):
    return FakeEngine(target, ["Hm</think>", "Yes", "."])


def lines(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_generated_stream_adds_up_to_the_whole_answer(engine):
    """Ollama streams unless it is told not to."""
    with client(engine) as server:
        *pieces, end = lines(server.post(GENERATE, json=ask(GENERATE)))
        whole = server.post(GENERATE, json=ask(GENERATE, stream=False)).json()
    assert not any(one["done"] for one in pieces) and end["done"] and whole["done"]
    for name, text in (("thinking", "Hm"), ("response", "Yes.")):
        assert whole[name] == "".join(one.get(name, "") for one in pieces) == text
    for last in (end, whole):
        assert last["model"] == "fake" and last["done_reason"] == "stop"
        assert last["eval_count"] > 3 and last["total_duration"] > last["load_duration"] > 0
        assert {"prompt_eval_duration", "eval_duration", "created_at"} <= set(last)


def test_the_result_of_a_tool_by_its_name(engine):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turns = [user("Hi"), {"role": "assistant", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_name": "f", "content": "42"})
    post(engine, CHAT, ask(CHAT, *turns, tools=[TOOL]))
    assert '[f {"a": 1}]' in engine.prompt() and "tool\n42" in engine.prompt()


@pytest.mark.parametrize(("think", "shown"), [(False, "off"), (True, "on"), ("low", "onlow")])
def test_thinking(think, shown):
    template = "{{ 'off' if enable_thinking is false else 'on' }}{{ reasoning_effort }}"
    engine = FakeEngine(make_target(template=template + "{{ messages[0].content }}"))
    post(engine, CHAT, ask(CHAT, think=think))
    assert engine.prompt() == shown + "Hi"


def test_a_header_says_that_the_model_does_not_think(engine):
    def ignored(target, path, **more):
        with client(FakeEngine(target)) as server:
            return server.post(path, json=ask(path, **more)).headers.get("x-dflash-ignored")

    plain = make_target()
    enabled = {"thinking": {"type": "enabled"}, "max_tokens": 3}
    assert ignored(plain, CHAT, think=True) == "thinking"
    assert ignored(plain, "/v1/messages", **enabled) == "thinking"
    assert ignored(plain, "/v1/chat/completions", reasoning_effort="low") == "thinking"
    assert ignored(plain, CHAT, think=False) is ignored(engine.target, CHAT, think=True) is None


def test_a_raw_prompt_is_continued(engine):
    with client(engine) as server:
        pieces = lines(server.post(GENERATE, json=ask(GENERATE, raw=True)))
        server.post(GENERATE, json=ask(GENERATE, system="Be brief."))
    assert "".join(one["response"] for one in pieces) == "Hm</think>Yes."
    assert engine.target.tokenizer.decode(engine.submitted[0][0]).endswith("Hi")
    assert len(engine.submitted[0][0]) < 9 and "system\nBe brief." in engine.prompt()


def test_a_request_without_a_prompt_loads_the_model(engine):
    with client(engine) as server:
        for path, prompt in ((CHAT, {"messages": []}), (GENERATE, {"prompt": ""})):
            answer = server.post(path, json={"model": "m", **prompt}).json()
            assert answer["done"] and answer["done_reason"] == "load"
    assert not engine.submitted


def test_lists_of_models(engine):
    """What Ollama's, LM Studio's and llama.cpp's clients look for."""
    length = engine.target.context_length
    with client(engine) as server:
        for path in ("/api/tags", "/api/ps"):
            [model] = server.get(path).json()["models"]
            assert model["name"] == model["model"] == "fake" and model["size"] == 2 * 4 * 4
            assert model["details"]["quantization_level"] == "4-bit"
        told = server.post("/api/show", json={"model": "fake"}).json()
        assert server.post("/api/show", json={"name": "fake"}).json() == told
        assert server.post("/api/show", json={}).status_code == 400
        assert told["capabilities"] == ["completion", "tools", "thinking"]
        assert told["model_info"]["llama.context_length"] == length
        version = Version(server.get("/api/version").json()["version"])
        assert version >= Version("0.6.4")  # VS Code asks for it
        [listed] = server.get("/v1/models").json()["data"]
        assert (listed["state"], listed["max_context_length"]) == ("loaded", length)
        assert server.post("/api/pull", json={"model": "m"}).status_code == 404
        for path in ("/api/embed", "/v1/embeddings"):
            answer = server.post(path, json={})
            assert answer.status_code == 404 and "makes no embeddings" in answer.text
