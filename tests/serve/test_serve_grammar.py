"""Grammars of schemas and forced calls."""

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

    def takes(text):
        matcher.reset()
        tokens = target.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return takes


@pytest.mark.parametrize("family", [*TAGGED, *JSON])
@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_parse(family, seed):
    """Whatever a model would choose under the grammar is a call that fits."""
    target = make_target(family)
    (grammar,) = grammars(target).make(ask(**FORCED), False)
    text = random_text(target.tokenizer, grammar._matcher, np.random.default_rng(seed))
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    split = AnswerParser(AnswerFormat.of(target.tokenizer), schemas)
    parts = split.feed(text) + split.finish(truncated=False)
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


def test_other_syntaxes_cannot_be_forced():
    with pytest.raises(RequestError, match="cannot be forced"):
        grammars(make_target("gemma4")).make(ask(**FORCED), False)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SUNNY = '{"city": "Rome", "unit": "C", "days": 3}'
SO = 'So: <tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
STRICT = [Tool("get_weather", "", SCHEMA, strict=True)]
FREE = {"schema": SCHEMA, "tools": TOOLS}
NAMED = {"allowed_tools": frozenset({"get_weather"})}
MOST = CALL * MAX_CALLS


@pytest.fixture(scope="module")
def target():
    return make_target("json_tools", thinking="<think>\n")


@pytest.mark.parametrize(
    ("thinks", "asked", "taken", "refused"),
    [
        (False, FORCED, [CALL, f"{CALL}\n{CALL}", MOST], ["Hm", "", MOST + CALL]),
        (False, FORCED | {"parallel_calls": False}, [CALL], [f"{CALL}\n{CALL}"]),
        (False, FORCED | NAMED, [], [CALL]),
        (True, FORCED, [f"Hm.\n</think>\n\n{CALL}"], [CALL, "Hm</think>no"]),
        (True, {"schema": SCHEMA}, [f"Hm</think>{SUNNY}"], ["Hm</think>{}"]),
        (False, {"tools": STRICT}, ["Hello.", SO % SUNNY], [SO % SUNNY.replace('"C"', '"K"')]),
        # A schema leaves the choice of a call.
        (False, FREE, [SUNNY, CALL], ["Hm", "{}", SUNNY + CALL]),
        (False, FREE | {"tool_choice": "none"}, [SUNNY], [CALL]),
    ],
)
def test_what_a_grammar_takes(target, thinks, asked, taken, refused):
    takes = acceptor(target, ask(**asked), thinks)
    assert all(map(takes, taken)) and not any(map(takes, refused))


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
def test_thoughts_before_an_answer_that_fits(family, added, thought, answer):
    """Thoughts that the model opens itself are accepted; at most two line breaks follow them."""
    target = make_target(family, added=added)
    takes = acceptor(target, ask(schema=SCHEMA))
    assert takes(answer + SUNNY) and takes(f"{thought}\n\n{answer}{SUNNY}")
    assert not takes(f"{thought}\n\n\n{answer}{SUNNY}") and not takes(f"{thought}{answer}Hi")
    if family == "json_tools":
        strict = acceptor(target, ask(tools=STRICT))
        assert strict(thought + SO % SUNNY) and not strict(thought + SO % "{}")


def test_invalid_schemas_are_refused(target):
    for schema, reason in (
        ({"type": "strang"}, "cannot be used: [^|%]*Invalid type: strang$"),
        ({"pattern": "(a"}, "cannot be used: [^|%]*group$"),
        ({"$ref": "https://example.org/x"}, None),
        ({"$ref": "#"}, None),
    ):
        with pytest.raises((SettingsError, RequestError), match=reason):
            grammars(target).make(ask(schema=schema), False)


@pytest.mark.parametrize(("objects", "each", "told"), [(1, 1001, "An object"), (7, 900, "All")])
def test_large_schemas_are_refused_before_they_take_seconds(objects, each, told):
    properties = {f"p{number}": {"type": "string"} for number in range(each)}
    parts = [{"type": "object", "properties": properties}] * objects
    for more in (
        {"schema": {"anyOf": parts}},
        {"tools": [Tool("f", "", parts[0])], "schema": {"anyOf": parts[1:]}},
        {
            "tools": [Tool(f"f{index}", "", part) for index, part in enumerate(parts)],
            "tool_choice": "required",
        },
    ):
        with pytest.raises(RequestError, match=f"{told}.* properties"):
            grammars(make_target("json_tools")).make(ask(**more), False)
