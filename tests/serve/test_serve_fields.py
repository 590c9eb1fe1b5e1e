"""Every field of the APIs: what it means, which values it takes, and why others are ignored.

tests/data/api_fields.json has the names of all fields of openai 3.57, anthropic 2.14 and ollama
0.6.3. A field of an object is written as "object.field".
"""

import json
import tomllib
from pathlib import Path

import make_docs
import pytest
from dialects import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    HI,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    ask,
    post_ok,
    user,
)
from serving import FakeEngine, client, make_target, post

APIS = json.loads((Path(__file__).parents[1] / "data" / "api_fields.json").read_text())
IGNORED = set().union(*tomllib.loads(make_docs.IGNORED.read_text()).values())
# A body's docstring begins with its API, such as "POST /v1/messages".
BODIES = {body.__doc__.split(" and ")[0]: body for body in make_docs.BODIES}
REQUEST = {"model": "fake", "prompt": "Hi", "input": "Hi", "messages": HI, "max_tokens": 9}
ABSENT = "absent"


@pytest.fixture(scope="module")
def target():
    return make_target("json_tools")


WHOLE_CONTEXT = {"repeat_penalty": 1.5, "repeat_last_n": -1}
NO_TOKENS = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "repeat_last_n": 0}
OPTIONS = {"temperature": 0.5, "top_k": 4, "seed": 7, "num_predict": 9, "stop": ["x"]}
OPTIONS |= {"repeat_penalty": 1.5, "repeat_last_n": 30, "num_ctx": 4096, "num_thread": 2}
SETTINGS = {"temperature": 0.5, "top_k": 4, "seed": 7, "max_tokens": 9, "stop": ["x"]}
SETTINGS |= {"repetition_penalty": 1.5, "repetition_context_size": 30}


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"max_completion_tokens": 5, "top_p": 0.9}, {"max_tokens": 5, "top_p": 0.9}),
        (CHAT, {"seed": -1, "temp": 0.2}, {"seed": None, "temperature": 0.2}),
        (CHAT, {"stop": "x"}, {"stop": ["x"]}),
        (CHAT, {"seed": 2**32 + 4, "top_k": -1}, {"seed": 4, "top_k": 0}),
        (CHAT, {"logit_bias": {"17": 3}}, {"logit_bias": {17: 3.0}}),
        (CHAT, WHOLE_CONTEXT, {"repetition_penalty": 1.5, "repetition_context_size": 2**31 - 1}),
        (CHAT, {"draft": False}, {"block_size": 1}),
        (RESPONSES, {"draft": False}, {"block_size": 1}),
        (RESPONSES, {"draft": True}, {"block_size": ABSENT}),
        (CHAT, {"stop": ""}, {"stop": ABSENT}),
        (CHAT, {"stop": [""]}, {"stop": ABSENT}),
        (CHAT, {"stop": []}, {"stop": ABSENT}),
        (CHAT, {"max_tokens": -1}, {"max_tokens": 7}),
        (COMPLETIONS, {"max_tokens": -1}, {"max_tokens": 7}),
        (CHAT, {}, {"max_tokens": 7, "temperature": 0.1}),
        (COMPLETIONS, {}, {"max_tokens": 16}),  # OpenAI's default
        (RESPONSES, {"max_output_tokens": -1}, {"max_tokens": 7}),
        (MESSAGES, {"stop_sequences": ["x", ""], "top_k": 3}, {"stop": ["x"], "top_k": 3}),
        (OLLAMA, {"options": OPTIONS}, SETTINGS),
        (GENERATE, {"options": OPTIONS}, SETTINGS),
        (OLLAMA, {"options": {"num_predict": -1}}, {"max_tokens": 7}),
        (OLLAMA, {"options": OPTIONS | {"repeat_penalty": 1}}, {"repetition_context_size": ABSENT}),
        (CHAT, {"repeat_last_n": 30}, {"repetition_context_size": ABSENT}),
        (CHAT, NO_TOKENS, {"repetition_penalty": 1.0, "presence_penalty": 0.5}),
    ],
)
def test_fields_become_settings_of_the_engine(engine, path, fields, expected):
    """The server's defaults, max_tokens=7 and temperature=0.1, apply where a request has none."""
    post_ok(engine, path, fields, max_tokens=7, temperature=0.1)
    [(_, settings)] = engine.submitted
    assert {name: settings.get(name, ABSENT) for name in expected} == expected


@pytest.mark.parametrize(
    ("size", "expected_penalty", "expected_size"), [(30, 1.1, 30), (0, 1.0, ABSENT)]
)
def test_repeat_last_n_applies_to_the_servers_repetition_penalty(
    engine, size, expected_penalty, expected_size
):
    """A request may set the size only. A size of 0 turns the penalty off."""
    post_ok(engine, CHAT, {"repeat_last_n": size}, repetition_penalty=1.1)
    [(_, settings)] = engine.submitted
    assert settings.get("repetition_penalty") == expected_penalty
    assert settings.get("repetition_context_size", ABSENT) == expected_size


def test_each_answer_of_a_request_has_another_seed(engine):
    post_ok(engine, CHAT, {"n": 2, "seed": 2**32 - 1})
    assert [settings["seed"] for _, settings in engine.submitted] == [2**32 - 1, 0]


IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
NAMED = {"type": "function", "name": "f", "function": {"name": "f"}}


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
def test_errors_about_unsupported_values_have_the_form_of_the_api(engine, path, wrong, param):
    """`param` is the field that OpenAI's errors name, or a part of the others' message."""
    answer = post(engine, path, ask(path, **wrong))
    content = answer.json()
    assert answer.status_code == 400 and not engine.submitted
    if path.startswith("/api/"):
        assert list(content) == ["error"] and param in content["error"]
        return
    error = content["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    if path == MESSAGES:
        assert content["type"] == "error" and param in error["message"]
        assert content["request_id"] == answer.headers["request-id"]
    else:
        assert error["param"] is param is None or error["param"].startswith(param)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_clients_recognize_a_prompt_that_is_too_long(path):
    text = "word " * 50
    with client(FakeEngine(make_target(context=20))) as server:
        answer = server.post(path, json=ask(path, text if path == COMPLETIONS else user(text)))
        assert server.get("/v1/models").json()["data"][0]["context_length"] == 20
    error = answer.json()["error"]
    assert answer.status_code == 400
    if path == MESSAGES:
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith(" tokens > 19 maximum")
    else:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 20 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (RESPONSES, {"text": {"verbosity": "low"}}),
        (CHAT, {"min_tokens": 0, "ignore_eos": False, "typical_p": 1.0, "stop_token_ids": []}),
        (CHAT, {"response_format": {"type": "text"}, "guided_json": None, "top_logprobs": 0}),
    ],
)
def test_values_that_change_nothing_are_not_reported_as_ignored(engine, path, more):
    assert "x-dflash-ignored" not in post_ok(engine, path, more).headers


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "schema": SCHEMA}
NESTED = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"guided_json": SCHEMA}),
        (CHAT, {"guided_json": json.dumps(SCHEMA)}),
        (COMPLETIONS, {"guided_json": SCHEMA}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, {"json_schema": SCHEMA}),
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
        (CHAT, {"response_format": FORM}),
        (COMPLETIONS, {"response_format": NESTED}),
        (MESSAGES, {"output_format": FORM}),
        (MESSAGES, {"output_config": {"format": FORM}}),
        (OLLAMA, {"format": SCHEMA}),
        (GENERATE, {"format": SCHEMA}),
    ],
)
def test_every_field_for_a_schema_constrains_the_answer(engine, path, more):
    post_ok(engine, path, more)
    (grammar,) = engine.submitted[0][1]["logits_processors"]
    encode = engine.target.tokenizer.encode
    fitting = encode('{"a": 1', add_special_tokens=False)
    other_key = encode('{"b": 1', add_special_tokens=False)
    assert grammar.follows([], fitting) == len(fitting)
    assert grammar.follows([], other_key) < len(other_key)


FUNCTION = {"name": "f", "parameters": SCHEMA}
JSON_OBJECT = {"type": "json_object"}
FORCED = {  # together with a format, as instructor sends it
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}], "response_format": JSON_OBJECT},
    RESPONSES: {"tools": [{"type": "function", **FUNCTION}], "text": {"format": JSON_OBJECT}},
}


@pytest.mark.parametrize("path", FORCED)
@pytest.mark.parametrize("choice", ["required", "any", NAMED])
def test_a_forced_call_takes_precedence_over_a_response_format(engine, path, choice):
    post_ok(engine, path, FORCED[path] | {"tool_choice": choice})
    (grammar,) = engine.submitted[0][1]["logits_processors"]
    call = engine.target.tokenizer.encode("<tool_call>", add_special_tokens=False)
    assert grammar.follows([], call) == len(call)


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "string", "format": "path"}, "path"),
        ({"type": "string", "format": "password"}, "password"),
        ({"type": "string", "format": "two\r\nlines: é"}, r"two\r\nlines: \xe9"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "date"}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_names_parts_of_a_schema_that_are_not_enforced(engine, schema, ignored, stream):
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": schema}}}}
    answer = post_ok(engine, CHAT, {"response_format": form, "stream": stream})
    header = answer.headers.get("x-dflash-ignored")
    assert header is None if ignored is None else ignored in header


def test_a_header_names_tools_that_are_left_out(engine):
    tools = [{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "mcp"}]
    answer = post_ok(engine, RESPONSES, {"tools": tools})
    assert answer.headers["x-dflash-ignored"] == "tool web_search; tool mcp"
    assert '"name": "f"' in engine.prompt()


BLOCKS = [{"type": "thinking", "thinking": "Hm.", "signature": "abc"}]
DETAILS = [{"type": "reasoning.text", "text": "Hm."}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        ({"thinking_blocks": BLOCKS}, "messages.thinking_blocks"),
        ({"reasoning_details": DETAILS}, "messages.reasoning_details"),
        ({"thinking": "Hm."}, "messages.thinking"),
        ({"thinking_blocks": [], "reasoning_details": None, "annotations": []}, None),
        ({"reasoning_content": "Hm."}, None),
    ],
)
def test_a_header_names_reasoning_that_is_not_read(engine, more, ignored, stream):
    """It names the field once, although several earlier messages have it."""
    answer_before = {"role": "assistant", "content": "Hello."} | more
    messages = [user("Hi"), answer_before, user("And?"), answer_before, user("More?")]
    answer = post_ok(engine, CHAT, {"messages": messages, "stream": stream})
    assert answer.headers.get("x-dflash-ignored") == ignored


def test_the_generation_prompt_is_left_out_only_to_continue_a_message(engine):
    begun = [user("Hi"), {"role": "assistant", "content": "Hel"}]
    continued = {"messages": begun, "continue_final_message": True}
    post_ok(engine, CHAT, {"add_generation_prompt": True})
    post_ok(engine, CHAT, continued | {"add_generation_prompt": False})
    assert engine.prompt().endswith("Hel")
    prefixed = [user("Hi"), {"role": "assistant", "content": "Hel", "prefix": True}]
    for more in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "messages": begun},
        {"add_generation_prompt": False, "continue_final_message": False},
        continued | {"add_generation_prompt": True},
        {"messages": prefixed, "add_generation_prompt": True},
    ):
        answer = post(engine, CHAT, ask(CHAT) | more)
        assert answer.status_code == 400, more
        assert answer.json()["error"]["param"] == "add_generation_prompt"


@pytest.mark.parametrize("api", APIS)
def test_every_field_is_used_refused_or_ignored_for_a_reason(api):
    table = make_docs.support(BODIES[api], depth=3)
    for field in APIS[api]:
        parts = field.split(".")
        # The field itself and the objects that contain it: a, a.b, a.b.c.
        path = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        is_refused = any(table.get(name) == "refused" for name in path)
        is_ignored = bool(path & IGNORED)
        assert field in table or is_refused or is_ignored, field


@pytest.mark.parametrize("api", APIS)
def test_fields_do_as_the_table_says(engine, api):
    path = api.split()[1]
    table = make_docs.support(BODIES[api], depth=1)
    request = {name: value for name, value in REQUEST.items() if table.get(name) != "refused"}
    ignored = {name: {"a": 1} for name in IGNORED - set(table) if "." not in name}
    with client(engine) as server:
        for name, text in table.items():
            if text.startswith(("refused", "only")):
                answer = server.post(path, json=request | {name: "x"})
                assert answer.status_code == 400 and name in answer.text, name
            if text.startswith("refused"):
                assert f"{name}: is not supported" in answer.text
        answer = server.post(path, json=request | ignored)
    assert answer.status_code == 200, answer.text
