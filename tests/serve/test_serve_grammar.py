"""Grammars that hold an answer to a schema, or force a call."""

import json

import jsonschema
import numpy as np
import pytest
from answers import JSON, TAGGED
from serving import make_target

from dflash_mlx.answers.families import AnswerFormat
from dflash_mlx.answers.parser import AnswerParser
from dflash_mlx.answers.parts import Text, ToolCall
from dflash_mlx.errors import SettingsError
from dflash_mlx.serve.generation_request import GenerationRequest, Tool
from dflash_mlx.serve.grammar import MAX_CALLS, GrammarFactory
from dflash_mlx.serve.http_errors import RequestError
from dflash_mlx.serve.openai_chat import ChatBody

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "New York"]},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", "", SCHEMA), Tool("now", "", {"type": "object", "maxProperties": 0})]
FORCED = {"tools": TOOLS, "tool_choice": "required"}


def ask(**more):
    return GenerationRequest("m", [{"role": "user", "content": "Hi"}], **more)


def grammars(target):
    return GrammarFactory(target, AnswerFormat.of(target.tokenizer))


def acceptor(target, request, thinking=False):
    """A function that says whether the grammar accepts a text as a whole answer."""
    (grammar,) = grammars(target).make(request, thinking)
    matcher = grammar._matcher

    def accepts(text):
        matcher.reset()
        tokens = target.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepts


@pytest.mark.parametrize("family", [*TAGGED, *JSON])
@pytest.mark.parametrize("seed", range(4))
def test_any_text_that_the_grammar_allows_is_a_valid_call(family, seed):
    """The text is random. It may have several calls."""
    target = make_target(family)
    (grammar,) = grammars(target).make(ask(**FORCED), False)
    text = random_text(target.tokenizer, grammar._matcher, np.random.default_rng(seed))
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    parser = AnswerParser(AnswerFormat.of(target.tokenizer), schemas)
    parts = parser.feed(text) + parser.finish(truncated=False)
    calls = [part for part in parts if part != Text("\n")]
    assert calls and all(isinstance(call, ToolCall) for call in calls), text
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def random_text(tokenizer, matcher, random, most=2000):
    """A text of random tokens, each of which the grammar allows."""
    tokens = []
    while not matcher.is_stopped() and len(tokens) < most:
        (allowed,) = np.nonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        ends = [token for token in allowed if token in tokenizer.eos_token_ids]
        if ends and random.random() < 0.5:
            break
        allowed = [token for token in allowed if token not in tokenizer.eos_token_ids]
        token = int(random.choice(allowed))
        assert matcher.try_consume_tokens([token]) == 1
        tokens.append(token)
    return tokenizer.decode(tokens)


def test_calls_of_some_families_cannot_be_forced():
    with pytest.raises(RequestError, match="cannot be forced"):
        grammars(make_target("gemma4")).make(ask(**FORCED), False)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SUNNY = '{"city": "Rome", "unit": "C", "days": 3}'
WORDS_AND_CALL = 'So: <tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
STRICT = [Tool("get_weather", "", SCHEMA, strict=True)]
SCHEMA_AND_TOOLS = {"schema": SCHEMA, "tools": TOOLS}
WEATHER_ONLY = {"allowed_tools": frozenset({"get_weather"})}
MOST_CALLS = CALL * MAX_CALLS


@pytest.fixture(scope="module")
def target():
    return make_target("json_tools", thinking="<think>\n")


@pytest.mark.parametrize(
    ("thinks", "fields", "accepted", "rejected"),
    [
        (False, FORCED, [CALL, f"{CALL}\n{CALL}", MOST_CALLS], ["Hm", "", MOST_CALLS + CALL]),
        (False, FORCED | {"parallel_calls": False}, [CALL], [f"{CALL}\n{CALL}"]),
        (False, FORCED | WEATHER_ONLY, [], [CALL]),
        (True, FORCED, [f"Hm.\n</think>\n\n{CALL}"], [CALL, "Hm</think>no"]),
        (True, {"schema": SCHEMA}, [f"Hm</think>{SUNNY}"], ["Hm</think>{}"]),
        (
            False,
            {"tools": STRICT},
            ["Hello.", WORDS_AND_CALL % SUNNY],
            [WORDS_AND_CALL % SUNNY.replace('"C"', '"K"')],
        ),
        # With a schema and tools, the model may choose an answer or a call.
        (False, SCHEMA_AND_TOOLS, [SUNNY, CALL], ["Hm", "{}", SUNNY + CALL]),
        (False, SCHEMA_AND_TOOLS | {"tool_choice": "none"}, [SUNNY], [CALL]),
    ],
)
def test_a_grammar_accepts_only_what_the_request_allows(target, thinks, fields, accepted, rejected):
    accepts = acceptor(target, ask(**fields), thinks)
    assert all(accepts(text) for text in accepted)
    assert not any(accepts(text) for text in rejected)


@pytest.mark.parametrize("named", [False, True])
def test_a_named_function_is_called_once(named):
    chosen = {"type": "function", "function": {"name": "now"}}
    body = ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "now"}}],
            "tool_choice": chosen if named else "required",
        }
    )
    request = body.generation_request()
    assert request.tool_choice == "required" and request.parallel_calls != named


@pytest.mark.parametrize(
    ("family", "added", "thought", "answer"),
    [
        ("json_tools", ["<think>", "</think>"], "<think>\nHm.\n</think>", ""),
        ("mistral", ["[THINK]", "[/THINK]"], "[THINK]Hm.[/THINK]", ""),
        ("gemma4", ["<|channel>", "<channel|>"], "<|channel>thought\nHm.\n<channel|>", ""),
        (
            "harmony",
            ["<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>"],
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
            "<|channel|>final<|message|>",
        ),
        (
            "muse_spark",
            ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
            " to=self<|message|>Hm.<|eom|><|start|>assistant",
            " to=user<|message|>",
        ),
    ],
)
def test_a_thought_may_come_before_an_answer_that_fits(family, added, thought, answer):
    """A model may think first, even if its prompt did not ask for it.

    At most two line breaks may follow the thought.
    """
    target = make_target(family, added=added)
    accepts = acceptor(target, ask(schema=SCHEMA))
    assert accepts(answer + SUNNY)
    assert accepts(f"{thought}\n\n{answer}{SUNNY}")
    assert not accepts(f"{thought}\n\n\n{answer}{SUNNY}")
    assert not accepts(f"{thought}{answer}Hi")
    if family == "json_tools":
        accepts_strict_call = acceptor(target, ask(tools=STRICT))
        assert accepts_strict_call(thought + WORDS_AND_CALL % SUNNY)
        assert not accepts_strict_call(thought + WORDS_AND_CALL % "{}")


def test_invalid_schemas_are_refused(target):
    for schema, reason in (
        ({"type": "strang"}, "cannot be used: [^|%]*Invalid type: strang$"),
        ({"pattern": "(a"}, "cannot be used: [^|%]*group$"),
        ({"$ref": "https://example.org/x"}, None),
        ({"$ref": "#"}, None),
    ):
        with pytest.raises((SettingsError, RequestError), match=reason):
            grammars(target).make(ask(schema=schema), False)


@pytest.mark.parametrize(("objects", "size", "message"), [(1, 1001, "An object"), (7, 900, "All")])
def test_large_schemas_are_refused_before_they_take_seconds(objects, size, message):
    """One object with too many properties, and several that have too many together."""
    properties = {f"p{number}": {"type": "string"} for number in range(size)}
    parts = [{"type": "object", "properties": properties}] * objects
    for more in (
        {"schema": {"anyOf": parts}},
        {"tools": [Tool("f", "", parts[0])], "schema": {"anyOf": parts[1:]}},
        {
            "tools": [Tool(f"f{index}", "", part) for index, part in enumerate(parts)],
            "tool_choice": "required",
        },
    ):
        with pytest.raises(RequestError, match=f"{message}.* properties"):
            grammars(make_target("json_tools")).make(ask(**more), False)
