"""What all APIs do alike: answers whole and streamed, refusals, prompts that agents send."""

import json
from pathlib import Path

import pytest
from dialects import (
    APIS,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    Chat,
    Messages,
    Ollama,
    Responses,
    ask,
)
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, client, frames, make_target, post

REQUESTS = Path(__file__).parents[1] / "data" / "requests"
HI = [{"role": "user", "content": "Hi"}]
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
NAMED = {"type": "function", "name": "f", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>'
STOPPED = {Chat: "tool_calls", Messages: "tool_use", Responses: "completed", Ollama: "stop"}
CUT = {Chat: "length", Messages: "max_tokens", Responses: "incomplete", Ollama: "length"}


@pytest.fixture(scope="module")
def thinking():
    return make_target(json_tools, thinking="<think>\n")


@pytest.mark.parametrize("api", APIS, ids=lambda one: one.path)
@pytest.mark.parametrize("truncated", [False, True])
def test_a_stream_adds_up_to_the_whole_answer(api, truncated, thinking):
    steps = ["Hm", ".\n</think>", "\n\nYe", "s."] + [CALL] * (not truncated)
    engine = FakeEngine(thinking, steps, reason="length" if truncated else "stop", cached=3)
    with client(engine) as server:
        found = []
        for streamed in (False, True):
            talk = api()
            talk.user("Hi")
            found.append(talk.ask(server, streamed))
    whole, streamed = found
    assert whole._replace(calls=[]) == streamed._replace(calls=[])
    calls = [[(name, json.loads(args)) for _, name, args in one.calls] for one in found]
    assert calls == [[("write", {"path": "a"})] * (not truncated)] * 2
    assert (whole.thought, whole.text) == ("Hm.", "Yes.")
    assert whole.reason == (CUT if truncated else STOPPED)[api]
    prompt, cached, output = whole.tokens
    said = sum(len(thinking.tokenizer.encode(one, add_special_tokens=False)) for one in steps)
    assert prompt == len(engine.submitted[0][0]) and output >= said
    assert cached in (3, None if api is Ollama else 3)


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [IMAGE]}, None),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"n": 9}, "n"),
        (CHAT, {"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"stop": ["a"] * 17}, "stop"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [["a"]]}, "prompt.0.0"),
        (COMPLETIONS, {"prompt": ["One"] * 33}, "prompt"),
        (COMPLETIONS, {"prompt": [[65]] * 33}, "prompt"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "weird"}]}, "input"),
        (RESPONSES, {"input": [IMAGE]}, None),
        (RESPONSES, {"tools": [{"type": "function"}]}, "tools"),
        (RESPONSES, {"tool_choice": NAMED}, "tool_choice"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"messages": [IMAGE]}, "image"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "built into"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "f"}}, "no tool 'f'"),
        (MESSAGES, {"tool_choice": {"type": "tool"}}, "has no name"),
        (MESSAGES, {"output_format": {"type": "json_schema"}}, "needs a schema"),
        (MESSAGES, {"temperature": 1.5}, "temperature"),
        (GENERATE, {"suffix": "x"}, "suffix"),
        (GENERATE, {"context": [1]}, "context"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"raw": True, "system": "s"}, "raw"),
        (OLLAMA, {"options": {"mirostat": 2}}, "mirostat"),
        (OLLAMA, {"messages": [HI[0] | {"images": ["iVBORw0KGgo="]}]}, "image"),
        (OLLAMA, {"format": "yaml"}, "'json', or a JSON schema"),
        (OLLAMA, {"options": []}, "options: Input should be an object"),
        (OLLAMA, {"model": None}, "model"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_form_of_the_api(engine, path, wrong, param):
    answer = post(engine, path, ask(path, **wrong))
    content = answer.json()
    assert answer.status_code == 400 and not engine.submitted
    if path.startswith("/api/"):
        assert list(content) == ["error"] and param in content["error"]
    elif path == MESSAGES:
        assert content["type"] == "error" and param in content["error"]["message"]
        assert content["error"]["type"] == "invalid_request_error"
        assert content["request_id"] == answer.headers["request-id"]
    else:
        error = content["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        assert error["param"] is param is None or error["param"].startswith(param)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (CHAT, "maximum context length is 20 tokens"),
        (COMPLETIONS, "maximum context length is 20 tokens"),
        (MESSAGES, "prompt is too long: "),
    ],
)
def test_clients_recognize_a_prompt_that_is_too_long(path, words):
    text = "word " * 50
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [HI[0] | {"content": text}]}
    with client(FakeEngine(make_target(context=20))) as server:
        answer = server.post(path, json=ask(path, **prompt))
        assert server.get("/v1/models").json()["data"][0]["context_length"] == 20
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"]
    assert path == MESSAGES or error["code"] == "context_length_exceeded"
    assert path != MESSAGES or error["message"].endswith(" tokens > 19 maximum")


FUNCTION = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PARTS = [{"type": "text", "text": "Go "}, {"type": "text", "text": "on."}]
TURNS = {
    CHAT: {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [FUNCTION]},
            {"role": "tool", "tool_call_id": "c", "content": "42"},
            {"role": "user", "content": PARTS},
        ]
    },
    RESPONSES: {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "42"},
            {"role": "user", "content": "Go on."},
        ],
    },
    MESSAGES: {
        "system": "Be brief.",
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": PARTS[:1]},
                    {"type": "text", "text": "42 Go on."},
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("path", TURNS)
def test_all_turns_reach_the_template(engine, path):
    answer = post(engine, path, ask(path, **TURNS[path]))
    assert answer.status_code == 200, answer.text
    prompt = engine.prompt()
    call = '{"name": "f", "arguments": {"a": 1}}'  # in words, for this template knows no tools
    places = ["<|im_start|>system\nBe brief.", "Hi", call, "<tool_response>", "42", "Go on."]
    assert [prompt.index(one) for one in places] == sorted(map(prompt.index, places))
    assert prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("opencode_chat_1", ["say hello"]),
        ("opencode_chat_2", ["say hello", '"name": "grep"']),
        ("codex_responses", ["say hello", "multi_agent_v1__close_agent", "exec_command"]),
    ],
)
def test_requests_of_agents(name, shown, thinking):
    request = json.loads((REQUESTS / f"{name}.json").read_text())
    engine = FakeEngine(thinking, ["x</think>Hello"])
    with client(engine) as server:
        answer = server.post(request["path"], json=request["body"], headers=request["headers"])
    talk = Responses() if "responses" in request["path"] else Chat()
    assert talk.read(talk.streamed(answer.text)).text == "Hello"
    assert all(word in engine.prompt() for word in shown)
    assert engine.prompt().rstrip().endswith("<think>")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA])
def test_an_error_ends_a_stream(target, path):
    text = post(FakeEngine(target, error=RuntimeError("no")), path, ask(path, stream=True)).text
    last = json.loads(text.splitlines()[-1]) if path == OLLAMA else frames(text)[-1]
    last = last.get("response", last)
    assert "RuntimeError: no" in json.dumps(last["error"]) and "[DONE]" not in text
