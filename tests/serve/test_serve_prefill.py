"""Prefilled answers: the last message is the beginning of an answer, which the model continues.

A whole answer is cut at many places. The server must return the same parts (thought, text, call)
as the whole answer has, without what comes before the cut.
"""

import json
import re

import jsonschema
import pytest
from answers import WRITERS, written
from dialects import CHAT, MESSAGES, OLLAMA, Chat, Messages, Ollama, Responses, user
from serving import ToldEngine, client, make_target, post, target_of

THOUGHT = "Let me STOP and\nthink, <b>3 < 4</b>."
TEXT = "Here it is: STOP. Then\n\nmore"
ARGUMENTS = {"path": "a\tb", "text": "two\nlines </a>"}
APIS = (Chat, Messages, Ollama)
WITH_HEADERS = ("harmony", "muse_spark")  # families whose answers begin with a header
FINAL = {"harmony": "<|channel|>final<|message|>", "muse_spark": " to=user<|message|>"}
each_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path[4:])


def answer_of(family):
    """The parts of a whole answer as (kind, text).

    Where answers have headers, the template writes the text's, so there is only text to continue.
    """
    if family in WITH_HEADERS:
        return [("text", TEXT)]
    thought = [("marker", "<think>\n"), ("thought", THOUGHT), ("marker", "\n</think>\n\n")]
    return [*thought, ("text", TEXT), ("call", written(family, "write", ARGUMENTS))]


def cuts_of(answer, control_tokens, number=7):
    """About `number` positions in each part of an answer to cut it at.

    None is inside a control token, or at an end of the answer.
    """
    cuts = set()
    start = 0
    for _, text in answer:
        end = start + len(text)
        cuts.update(range(start, end + 1, max(1, len(text) // number)))
        cuts.add(end)
        start = end
    whole = "".join(text for _, text in answer)
    cuts -= {0, len(whole)}
    for match in control_tokens.finditer(whole):
        cuts -= set(range(match.start() + 1, match.end()))
    return sorted(cuts)


def rest_of(answer, kind, cut):
    """The text of all parts of one kind that comes after a position in the answer."""
    remaining = ""
    start = 0
    for part_kind, text in answer:
        if part_kind == kind:
            remaining += text[max(0, cut - start) :]
        start += len(text)
    return remaining


def prefill(talk, engine, server, answer, cut, streamed=False, **more):
    """The answer to a conversation that ends with the beginning of the answer."""
    whole = "".join(text for _, text in answer)
    talk.items = [user("Write."), {"role": "assistant", "content": whole[:cut]}]
    engine.steps = [whole[cut:]]
    if talk.path == CHAT:
        more["continue_final_message"] = True
    return talk.ask(server, streamed, **more)


def control_token_pattern(target):
    """Finds each control token of a target; without any, `(?!)` finds nothing."""
    return re.compile("|".join(map(re.escape, target.tokenizer.get_added_vocab())) or r"(?!)")


@each_api
@pytest.mark.parametrize("family", WRITERS)
def test_thoughts_text_and_calls_are_continued(family, api):
    target = target_of(family)
    answer = answer_of(family)
    engine = ToldEngine(target)
    talk = api()
    with client(engine) as server:
        for number, cut in enumerate(cuts_of(answer, control_token_pattern(target))):
            said = prefill(
                talk, engine=engine, server=server, answer=answer, cut=cut, streamed=number % 2 == 1
            )
            thought = rest_of(answer, "thought", cut)
            text = rest_of(answer, "text", cut)
            call = rest_of(answer, "call", cut)
            calls = [(name, json.loads(arguments)) for _, name, arguments in said.calls]
            assert (said.thought or "").strip("\n") == thought.strip("\n"), cut
            assert said.text == text, cut
            assert calls == ([("write", ARGUMENTS)] if call else []), cut


@each_api
@pytest.mark.parametrize("family", ["json_tools", "harmony", "deepseek_v31", "llama3"])
def test_stop_strings_count_only_in_the_text(family, api):
    """The thought has the stop string as well, which does not end the answer there."""
    target = target_of(family)
    answer = answer_of(family)
    engine = ToldEngine(target)
    talk = api()
    more = {
        Chat: {"stop": ["STOP"]},
        Messages: {"stop_sequences": ["STOP"]},
        Ollama: {"options": {"stop": ["STOP"]}},
    }[api]
    with client(engine) as server:
        for cut in cuts_of(answer, control_token_pattern(target)):
            said = prefill(talk, engine=engine, server=server, answer=answer, cut=cut, **more)
            before, stop, _ = rest_of(answer, "text", cut).partition("STOP")
            call = rest_of(answer, "call", cut)
            reaches_call = call != "" and stop == ""
            assert said.text == before, cut
            assert bool(said.calls) == reaches_call, cut


@each_api
@pytest.mark.parametrize("family", ["json_tools", "glm47", "mistral"])
def test_an_unfinished_call_is_text(family, api):
    """The answer has only the part that is not in the message."""
    target = target_of(family)
    call = written(family, "write", {"path": "x"})
    answer = [("text", call[: len(call) // 3])]
    engine = ToldEngine(target)
    talk = api()
    with client(engine) as server:
        for cut in cuts_of(answer, control_token_pattern(target)):
            said = prefill(talk, engine=engine, server=server, answer=answer, cut=cut)
            assert (said.text, said.calls) == (rest_of(answer, "text", cut), []), cut


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMATS = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    OLLAMA: {"format": SCHEMA},
}
JSON = ['{"a": 12, "b": [true, false]}', '{\n  "a":12,\n  "b":[\n    true ]\n}']


@each_api
@pytest.mark.parametrize("json_text", JSON, ids=["one line", "pretty"])
@pytest.mark.parametrize("family", WRITERS)
def test_json_of_a_schema_is_continued(family, json_text, api):
    """The beginning and its continuation fit the schema together, in the beginning's layout."""
    target = target_of(family)
    thought = [] if family in WITH_HEADERS else answer_of(family)[:3]
    answer = [*thought, ("text", json_text)]
    engine = ToldEngine(target)
    talk = api()
    with client(engine) as server:
        for cut in cuts_of(answer, control_token_pattern(target), 4):
            beginning = json_text.removesuffix(rest_of(answer, "text", cut))
            if json_text == JSON[1] and "\n" not in beginning:
                continue  # the beginning does not show yet that the JSON has several lines
            said = prefill(
                talk, engine=engine, server=server, answer=answer, cut=cut, **FORMATS[api.path]
            )
            assert (said.thought or "").strip("\n") == rest_of(answer, "thought", cut).strip("\n")
            assert beginning + said.text == json_text, cut
            jsonschema.validate(json.loads(beginning + said.text), SCHEMA)


@each_api
def test_a_beginning_that_the_schema_excludes_is_refused(api):
    engine = ToldEngine(target_of("json_tools"), ["{}"])
    talk = api()
    talk.items = [user("Go."), {"role": "assistant", "content": 'Sure: {"a": '}]
    more = FORMATS[api.path] | {"continue_final_message": True}
    answer = post(engine, api.path, {"model": "m", "max_tokens": 9, **talk.body(**more)})
    assert answer.status_code == 400 and "the message to continue does not fit" in answer.text


@pytest.mark.parametrize("api", [Chat, Messages], ids=["chat", "messages"])
@pytest.mark.parametrize("family", ["json_tools", "glm47", "kimi_k2", "qwen3_coder"])
def test_a_forced_call_is_continued(family, api):
    target = target_of(family)
    answer = [("call", written(family, "write", ARGUMENTS))]
    engine = ToldEngine(target)
    talk = api()
    more = {"tool_choice": {"type": "any"} if api is Messages else "required"}
    with client(engine) as server:
        for cut in cuts_of(answer, control_token_pattern(target)):
            [(_, name, arguments)] = prefill(
                talk, engine=engine, server=server, answer=answer, cut=cut, **more
            ).calls
            assert (name, json.loads(arguments)) == ("write", ARGUMENTS), cut


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_log_probabilities_are_only_those_of_the_continuation(path):
    target = target_of("json_tools")
    answer = answer_of("json_tools")[:4]
    engine = ToldEngine(target)
    whole = "".join(text for _, text in answer)
    with client(engine) as server:
        for cut in cuts_of(answer, control_token_pattern(target)):
            engine.steps = [whole[cut:]]
            messages = [user("Go."), {"role": "assistant", "content": whole[:cut]}]
            body = {"model": "m", "messages": messages, "logprobs": True, "stream": False}
            said = server.post(path, json=body | {"continue_final_message": True}).json()
            rows = said["choices"][0]["logprobs"]["content"] if path == CHAT else said["logprobs"]
            assert "".join(row["token"] for row in rows) == whole[cut:]


# A template that opens each thought, and one that ends the thoughts of earlier answers.
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ENDED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<A>"
    "{% if not loop.last %}</think>{% elif '</think>' not in m.content %}</think>\n\n{% endif %}"
    "{% else %}<U>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>{% endif %}"
)


@each_api
@pytest.mark.parametrize(
    ("template", "beginning", "rest", "expected"),
    [
        (OPENED, "Hm", " so</think>\n\nYes", (" so", "Yes")),
        (OPENED, "Hm</think>\n\nY", "es", (None, "es")),
        (ENDED, "Y", "es", (None, "es")),
        (ENDED, "Hm</think>Y", "es", (None, "es")),
    ],
)
def test_answers_continue_where_the_template_opens_or_ends_the_thought(
    template, beginning, rest, expected, api
):
    """`expected` is the thought and the text of the continuation."""
    engine = ToldEngine(make_target("json_tools", template, thinking=""), [rest])
    talk = api()
    with client(engine) as server:
        whole = [("text", beginning + rest)]
        said = prefill(talk, engine=engine, server=server, answer=whole, cut=len(beginning))
    assert (said.thought, said.text) == expected


@pytest.mark.parametrize(
    "api", [Responses, Ollama, Messages], ids=["responses", "ollama", "messages"]
)
def test_a_turn_with_a_call_is_not_continued(api):
    engine = ToldEngine(target_of("json_tools"), ["Yes"])
    talk = api("Go.")
    with client(engine) as server:
        engine.steps = [written("json_tools", "write", ARGUMENTS)]
        assert talk.ask(server).calls
        engine.steps = ["Yes"]
        assert talk.ask(server).text == "Yes"
    assert engine.prompt().endswith("<|im_start|>assistant\n")
