"""Every field of the APIs: what it means, what it may be, and why another one is ignored.

tests/data/api_fields.json has the names of the fields that openai 3.57, anthropic 2.14 and ollama
0.6.3 know, those in a field behind a dot.
"""

import json
import tomllib
from pathlib import Path

import make_docs
import pytest
from dialects import CHAT, COMPLETIONS, GENERATE, HI, MESSAGES, OLLAMA, RESPONSES, ask, user
from serving import FakeEngine, client, make_target, post

APIS = json.loads((Path(__file__).parents[1] / "data" / "api_fields.json").read_text())
IGNORED = {
    name for names in tomllib.loads(make_docs.IGNORED.read_text()).values() for name in names
}
BODIES = {body.__doc__.split(" and ")[0]: body for body in make_docs.BODIES}
REQUEST = {"model": "fake", "prompt": "Hi", "input": "Hi", "messages": HI, "max_tokens": 9}
ABSENT = "absent"


@pytest.fixture(scope="module")
def target():
    return make_target("json_tools")


def post_ok(engine, path, more, **defaults):
    """Post a request with these fields, check that it is answered, and return the response."""
    answer = post(engine, path, ask(path) | more, defaults=defaults)
    assert answer.status_code == 200, answer.text
    return answer


REPEAT = {"repeat_penalty": 1.5, "repeat_last_n": -1}
NONE_AT_ALL = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "repeat_last_n": 0}
OPTIONS = {"temperature": 0.5, "top_k": 4, "seed": 7, "num_predict": 9, "stop": ["x"]}
OPTIONS |= {"repeat_penalty": 1.5, "repeat_last_n": 30, "num_ctx": 4096, "num_thread": 2}
MEANT = {"temperature": 0.5, "top_k": 4, "seed": 7, "max_tokens": 9, "stop": ["x"]}
MEANT |= {"repetition_penalty": 1.5, "repetition_context_size": 30}


@pytest.mark.parametrize(
    ("path", "sent", "meant"),
    [
        (CHAT, {"max_completion_tokens": 5, "top_p": 0.9}, {"max_tokens": 5, "top_p": 0.9}),
        (CHAT, {"seed": -1, "temp": 0.2}, {"seed": None, "temperature": 0.2}),
        (CHAT, {"stop": "x"}, {"stop": ["x"]}),
        (CHAT, {"seed": 2**32 + 4, "top_k": -1}, {"seed": 4, "top_k": 0}),
        (CHAT, {"logit_bias": {"17": 3}}, {"logit_bias": {17: 3.0}}),
        (CHAT, REPEAT, {"repetition_penalty": 1.5, "repetition_context_size": 2**31 - 1}),
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
        (OLLAMA, {"options": OPTIONS}, MEANT),
        (GENERATE, {"options": OPTIONS}, MEANT),
        (OLLAMA, {"options": {"num_predict": -1}}, {"max_tokens": 7}),
        (OLLAMA, {"options": OPTIONS | {"repeat_penalty": 1}}, {"repetition_context_size": ABSENT}),
        (CHAT, {"repeat_last_n": 30}, {"repetition_context_size": ABSENT}),
        (CHAT, NONE_AT_ALL, {"repetition_penalty": 1.0, "presence_penalty": 0.5}),
    ],
)
def test_fields_become_settings_of_the_engine(engine, path, sent, meant):
    post_ok(engine, path, sent, max_tokens=7, temperature=0.1)
    [(_, settings)] = engine.submitted
    assert {name: settings.get(name, ABSENT) for name in meant} == meant


def test_a_size_alone_applies_to_the_servers_repetition_penalty(engine):
    for size, meant in ((30, (1.1, 30)), (0, (1.0, ABSENT))):
        post_ok(engine, CHAT, {"repeat_last_n": size}, repetition_penalty=1.1)
        settings = engine.submitted[-1][1]
        names = "repetition_penalty", "repetition_context_size"
        assert tuple(settings.get(name, ABSENT) for name in names) == meant


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
def test_what_cannot_be_done_is_refused_in_the_form_of_the_api(engine, path, wrong, param):
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
def test_settings_that_change_nothing_are_not_named_as_ignored(engine, path, more):
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
def test_a_schema_by_any_name_binds_the_answer(engine, path, more):
    post_ok(engine, path, more)
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
    """Clients and templates name it differently; a header says if the model thinks nevertheless."""
    template = f"{{% if {switch} is false %}}calm{{% endif %}}{{{{ messages[0].content }}}}"
    engine = FakeEngine(make_target(template=template, thinking=""))
    answer = post_ok(engine, path, more, chat_template_kwargs={switch: True})
    switchable = switch != "other"
    assert engine.prompt() == "calm" * switchable + "Hi"
    assert answer.headers.get("x-dflash-ignored") == (None if switchable else "thinking")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA, GENERATE])
@pytest.mark.parametrize("added", [(), ("<think>", "</think>")])
def test_a_request_without_a_choice_leaves_it_to_the_template(path, added):
    names = "enable_thinking", "thinking", "reasoning_effort"
    template = "".join(f"{{{{ {name} is defined }}}}" for name in names)
    engine = FakeEngine(make_target(template=template + "{{ messages[0].content }}", added=added))
    post_ok(engine, path, {})
    assert engine.prompt() == "FalseFalseFalseHi"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_thinking_between_tools_does_not_switch_the_template(engine, path):
    answer = post_ok(engine, path, {"thinking": {"type": "between_tools"}})
    assert answer.headers["x-dflash-ignored"] == "thinking between_tools"


def test_documents_reach_a_template_that_reads_them():
    template = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ documents is none }}"
    engine = FakeEngine(make_target(template=template + "{{ messages[0].content }}"))
    post_ok(engine, CHAT, {})
    assert engine.prompt() == "TrueHi"
    post_ok(engine, CHAT, {"chat_template_kwargs": {"documents": [{"text": "Read."}]}})
    assert engine.prompt() == "Read.FalseHi"


@pytest.mark.parametrize(("think", "shown"), [(False, "off"), (True, "on"), ("low", "onlow")])
def test_ollamas_think_sets_the_switch_and_the_effort(think, shown):
    template = "{{ 'off' if enable_thinking is false else 'on' }}{{ reasoning_effort }}"
    engine = FakeEngine(make_target(template=template + "{{ messages[0].content }}"))
    post_ok(engine, OLLAMA, {"think": think})
    assert engine.prompt() == shown + "Hi"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (OLLAMA, {"think": True}),
        (MESSAGES, {"thinking": {"type": "enabled"}, "max_tokens": 3}),
        (CHAT, {"reasoning_effort": "low"}),
    ],
)
def test_a_header_says_that_the_model_does_not_think(engine, path, more):
    assert post_ok(engine, path, more).headers["x-dflash-ignored"] == "thinking"
    thinks = FakeEngine(make_target("json_tools", thinking="<think>\n"))
    assert post_ok(thinks, path, more).headers.get("x-dflash-ignored") != "thinking"
    assert "x-dflash-ignored" not in post_ok(engine, OLLAMA, {"think": False}).headers


FUNCTION = {"name": "f", "parameters": SCHEMA}
JSON_OBJECT = {"type": "json_object"}
FORCED = {  # together with a format, as instructor sends it
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}], "response_format": JSON_OBJECT},
    RESPONSES: {"tools": [{"type": "function", **FUNCTION}], "text": {"format": JSON_OBJECT}},
}


@pytest.mark.parametrize("path", FORCED)
@pytest.mark.parametrize("choice", ["required", "any", NAMED])
def test_a_forced_call_prevails_over_a_format(engine, path, choice):
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
def test_a_header_names_what_a_grammar_cannot_hold(engine, schema, ignored, stream):
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
    """Once, although each of an agent's earlier messages has it."""
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
        covered = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        refused = any(table.get(name) == "refused" for name in covered)
        assert field in table or refused or covered & IGNORED, field


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
                assert not text.startswith("refused") or f"{name}: is not supported" in answer.text
        answer = server.post(path, json=request | ignored)
    assert answer.status_code == 200, answer.text
