"""What clients of other servers and models send, in every API: images, hints, other names."""

import asyncio
import json

import pytest
from dialects import CHAT, COMPLETIONS, GENERATE, MESSAGES, OLLAMA, RESPONSES, ask, user
from mlx_lm.tool_parsers import json_tools
from serving import FakeEngine, FakeJob, client, frames, make_target, post

from dflash_mlx.serve import sse

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
URL = "data:image/png;base64,iVBORw0KGgo="
SEEN = "[image: this model reads text only]"
# An image in a user's own message, in each API.
IMAGES = {
    CHAT: {"type": "image_url", "image_url": {"url": URL}},
    RESPONSES: {"type": "input_image", "image_url": URL},
    MESSAGES: {"type": "image", "source": PNG},
}
# What a tool returns for an image, in each API, as opencode, Codex and Claude Code send it.
RESULTS = {
    CHAT: [
        {"role": "tool", "tool_call_id": "t", "content": "Image read successfully"},
        {"role": "user", "content": [{"type": "text", "text": "From the tool:"}, IMAGES[CHAT]]},
    ],
    RESPONSES: [{"type": "function_call_output", "call_id": "t", "output": [IMAGES[RESPONSES]]}],
    MESSAGES: [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGES[MESSAGES]]}],
        }
    ],
}
CALLS = {
    CHAT: {
        "role": "assistant",
        "tool_calls": [{"id": "t", "function": {"name": "view", "arguments": "{}"}}],
    },
    RESPONSES: {"type": "function_call", "call_id": "t", "name": "view", "arguments": "{}"},
    MESSAGES: {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "view", "input": {}}],
    },
}


@pytest.fixture(scope="module")
def target():
    return make_target(json_tools)


@pytest.fixture
def engine(target):
    return FakeEngine(target)


@pytest.mark.parametrize("path", IMAGES)
def test_an_image_in_the_history_is_a_line_of_text(engine, path):
    look, image = user("Look at it."), IMAGES[path]
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "this"}
    histories = [
        [look, CALLS[path], *RESULTS[path]],
        [look, CALLS[path], *RESULTS[path], user("2+2?")],
        [user([text, image]), {"role": "assistant", "content": "No."}, user("2+2?")],
    ]
    with client(engine) as server:
        for history in histories:
            answer = server.post(path, json=ask(path, *history))
            assert answer.status_code == 200, answer.text
            assert engine.prompt().count(SEEN) == 1
        for newest in ([image], [text, image]):
            answer = server.post(path, json=ask(path, *histories[1], user(newest)))
            assert answer.status_code == 400 and "'image'" in answer.json()["error"]["message"]


def test_what_else_is_no_text(engine):
    pdf = {"type": "document", "source": {**PNG, "media_type": "application/pdf"}}
    content = [{"type": "tool_result", "tool_use_id": "t", "content": [pdf]}]
    audio = {"type": "input_audio", "input_audio": {}}
    with client(engine) as server:
        history = [user("Read."), CALLS[MESSAGES], user(content)]
        assert server.post(MESSAGES, json=ask(MESSAGES, *history)).status_code == 200
        assert "[document: this model reads text only]" in engine.prompt()
        server.post(CHAT, json=ask(CHAT, user([audio]), {"role": "assistant"}, user("So?")))
        assert "[audio: this model reads text only]" in engine.prompt()
        items = [user("Search."), {"type": "web_search_call", "id": "w"}, user("So?")]
        assert server.post(RESPONSES, json=ask(RESPONSES, *items)).status_code == 200
        assert "[web_search_call: this model reads text only]" in engine.prompt()


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (RESPONSES, {"text": {"verbosity": "low"}}),
        (CHAT, {"min_tokens": 0, "ignore_eos": False, "typical_p": 1.0, "stop_token_ids": []}),
        (CHAT, {"response_format": {"type": "text"}, "guided_json": None, "top_logprobs": 0}),
    ],
)
def test_hints_and_settings_that_change_nothing(engine, path, more):
    answer = post(engine, path, ask(path, **more))
    assert answer.status_code == 200, answer.text
    assert "x-dflash-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"guided_json": SCHEMA}),
        (CHAT, {"guided_json": json.dumps(SCHEMA)}),
        (COMPLETIONS, {"guided_json": SCHEMA}),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}),
        (CHAT, {"json_schema": SCHEMA}),
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
        (CHAT, {"response_format": {"type": "json_schema", "schema": SCHEMA}}),
        (
            COMPLETIONS,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (OLLAMA, {"format": SCHEMA}),
        (GENERATE, {"format": SCHEMA}),
    ],
)
def test_a_schema_by_any_name_binds_the_answer(engine, path, more):
    answer = post(engine, path, ask(path, **more))
    assert answer.status_code == 200, answer.text
    (grammar,) = engine.submitted[0][1]["logits_processors"]
    encode = engine.target.tokenizer.encode
    right, wrong = (encode(text, add_special_tokens=False) for text in ('{"a": 1', '{"b": 1'))
    assert grammar.follows([], right) == len(right) and grammar.follows([], wrong) < len(wrong)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"reasoning": {"effort": "none"}}),
        (CHAT, {"reasoning": {"enabled": False}}),
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"thinking": {"type": "disabled"}}),
        (CHAT, {"enable_thinking": False}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"chat_template_kwargs": {"thinking": False}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (OLLAMA, {"think": False, "stream": False}),
    ],
)
@pytest.mark.parametrize("switch", ["enable_thinking", "thinking", "other"])
def test_thinking_is_off_by_any_name(path, more, switch):
    """Clients and templates have a name each; a model that thinks all the same is said to."""
    template = f"{{% if {switch} is false %}}calm{{% endif %}}{{{{ messages[0].content }}}}"
    engine = FakeEngine(make_target(template=template, thinking=""))
    answer = post(engine, path, ask(path) | more, defaults={"chat_template_kwargs": {switch: True}})
    assert answer.status_code == 200
    known = switch != "other"
    assert engine.prompt() == "calm" * known + "Hi"
    assert answer.headers.get("x-dflash-ignored") == (None if known else "thinking")


FUNCTION = {"name": "f", "parameters": SCHEMA}
FORCED = {  # beside a format, as instructor sends it
    CHAT: {
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_object"},
    },
    RESPONSES: {
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_object"}},
    },
}


@pytest.mark.parametrize("path", FORCED)
@pytest.mark.parametrize("choice", ["required", "any", "named"])
def test_a_forced_call_beside_a_format(engine, path, choice):
    named = {"type": "function", "name": "f", "function": {"name": "f"}}
    more = FORCED[path] | {"tool_choice": named if choice == "named" else choice}
    answer = post(engine, path, ask(path, **more))
    assert answer.status_code == 200, answer.text
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
def test_a_header_names_what_a_grammar_cannot_hold(engine, schema, ignored, stream):
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": schema}}}}
    answer = post(engine, CHAT, ask(CHAT, response_format=form, stream=stream))
    assert answer.status_code == 200, answer.text
    found = answer.headers.get("x-dflash-ignored")
    assert found is None if ignored is None else ignored in found


def test_a_header_names_tools_that_are_left_out(engine):
    tools = [{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "mcp"}]
    answer = post(engine, RESPONSES, ask(RESPONSES, tools=tools))
    assert answer.headers["x-dflash-ignored"] == "tool web_search; tool mcp"
    assert '"name": "f"' in engine.prompt()


class SlowJob(FakeJob):
    """Begins after two pings of its response."""

    pings = 0

    async def __aiter__(self):
        while SlowJob.pings < 2:
            await asyncio.sleep(0)
        async for event in super().__aiter__():
            yield event


PINGS = {
    CHAT: lambda event: (
        event["choices"][0]["delta"] == {} and event["choices"][0]["finish_reason"] is None
    ),
    COMPLETIONS: lambda event: event["choices"][0]["text"] == "" and "x_dflash" not in event,
    RESPONSES: lambda event: event["type"] == "response.in_progress",
    MESSAGES: lambda event: event["type"] == "ping",
}


@pytest.mark.parametrize("path", PINGS)
def test_a_silent_stream_sends_events(engine, path, monkeypatch):
    """Comments are no events: Codex, for one, gives up on a stream that has nothing else."""
    monkeypatch.setattr(sse, "PING_SECONDS", 0)
    monkeypatch.setattr("serving.FakeJob", SlowJob)
    monkeypatch.setattr(SlowJob, "pings", 0)
    with_pings = sse._with_pings

    def counted(response):
        def ping(plain=response.ping):
            SlowJob.pings += 1
            return plain()

        response.ping = ping
        return with_pings(response)

    monkeypatch.setattr(sse, "_with_pings", counted)
    plain = post(engine, path, ask(path, stream=True)).text
    events = frames(plain)
    pings = [event for event in events if PINGS[path](event)]
    assert len(pings) > 1 and not any(line.startswith(":") for line in plain.splitlines())
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    else:
        ids = {event["id"] for event in events if "id" in event}
        assert len(ids) == (path != MESSAGES)
