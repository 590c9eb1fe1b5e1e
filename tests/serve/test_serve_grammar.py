"""Grammars of schemas and forced calls."""

import json

import jsonschema
import numpy as np
import pytest
from answers import JSON, TAGGED
from mlx_lm.tool_parsers import json_tools
from serving import make_target

from dflash_mlx.answers.families import AnswerFormat
from dflash_mlx.answers.parser import AnswerParser, Text, ToolCall
from dflash_mlx.errors import SettingsError
from dflash_mlx.serve.chat import ChatBody
from dflash_mlx.serve.errors import RequestError
from dflash_mlx.serve.grammar import MAX_CALLS, GrammarFactory
from dflash_mlx.serve.request import GenerationRequest, Tool

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
FAMILIES = [*TAGGED, *JSON]


def ask(**more):
    return GenerationRequest("m", [{"role": "user", "content": "Hi"}], **more)


def grammars(target):
    return GrammarFactory(target, AnswerFormat.of(target.tokenizer))


def follows(target, request, thinking=False):
    """A function that says whether a text is an answer that the grammar takes whole."""
    (grammar,) = grammars(target).make(request, thinking)
    matcher = grammar._matcher

    def takes(text):
        matcher.reset()
        tokens = target.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return takes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_parse(family, seed):
    """Whatever a model would choose under the grammar is a call that fits."""
    target = make_target(family)
    (grammar,) = grammars(target).make(ask(tools=TOOLS, tool_choice="required"), False)
    text = at_random(target.tokenizer, grammar._matcher, np.random.default_rng(seed))
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    split = AnswerParser(AnswerFormat.of(target.tokenizer), schemas)
    calls = split.feed(text) + split.finish(truncated=False)
    assert calls and all(isinstance(one, ToolCall) for one in calls if one != Text("\n")), text
    for call in calls:
        if isinstance(call, ToolCall):
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def at_random(tokenizer, matcher, random, most=2000):
    """A text of tokens that are allowed, one after the other."""
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
        grammars(make_target("gemma4")).make(ask(tools=TOOLS, tool_choice="required"), False)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def target():
    return make_target(json_tools, thinking="<think>\n")


def test_which_calls_a_grammar_allows(target):
    takes = follows(target, ask(tools=TOOLS, tool_choice="required"))
    assert takes(CALL) and takes(f"{CALL}\n{CALL}") and not takes("Hm") and not takes("")
    assert takes(CALL * MAX_CALLS) and not takes(CALL * (MAX_CALLS + 1))
    takes = follows(target, ask(tools=TOOLS, tool_choice="required", parallel_calls=False))
    assert takes(CALL) and not takes(f"{CALL}\n{CALL}")
    named = ask(tools=TOOLS, tool_choice="required", allowed_tools=frozenset({"get_weather"}))
    assert not follows(target, named)(CALL)


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


def test_the_model_may_think_first(target):
    takes = follows(target, ask(tools=TOOLS, tool_choice="required"), thinking=True)
    assert takes(f"Hm.\n</think>\n\n{CALL}") and not takes(CALL) and not takes("Hm</think>no")
    takes = follows(target, ask(schema=SCHEMA), thinking=True)
    assert takes('Hm</think>{"city": "Rome", "unit": "C", "days": 3}') and not takes("Hm</think>{}")


SUNNY = '{"city": "Rome", "unit": "C", "days": 3}'


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
    """Also where the model opens them itself; at most two line breaks follow."""
    target = make_target(family, added=added)
    takes = follows(target, ask(schema=SCHEMA))
    assert takes(answer + SUNNY) and takes(f"{thought}\n\n{answer}{SUNNY}")
    assert not takes(f"{thought}\n\n\n{answer}{SUNNY}") and not takes(f"{thought}{answer}Hi")
    if family == "json_tools":
        strict = follows(target, ask(tools=[Tool("get_weather", "", SCHEMA, strict=True)]))
        call = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
        assert strict(f"{thought}Yes. {call % SUNNY}") and not strict(thought + call % "{}")


def test_strict_tools_leave_text_free(target):
    strict = [Tool("get_weather", "", SCHEMA, strict=True)]
    takes = follows(target, ask(tools=strict))
    good = json.dumps(
        {"name": "get_weather", "arguments": {"city": "Rome", "unit": "F", "days": 1}}
    )
    wrong = good.replace('"F"', '"K"')
    assert takes("Hello.") and takes(f"So: <tool_call>\n{good}\n</tool_call>")
    assert not takes(f"So: <tool_call>\n{wrong}\n</tool_call>")


def test_a_schema_leaves_the_choice_of_a_call(target):
    takes = follows(target, ask(schema=SCHEMA, tools=TOOLS))
    answer = '{"city": "Rome", "unit": "C", "days": 3}'
    assert takes(answer) and takes(CALL) and not takes("Hm") and not takes("{}")
    assert not takes(f"{answer}{CALL}")
    assert not follows(target, ask(schema=SCHEMA, tools=TOOLS, tool_choice="none"))(CALL)


def test_invalid_schemas_are_refused(target):
    for schema in ({"type": "nonsense"}, {"$ref": "https://example.org/x"}, {"$ref": "#"}):
        with pytest.raises((SettingsError, RequestError)):
            grammars(target).make(ask(schema=schema), False)
    for schema, reason in (
        ({"type": "strang"}, "Invalid type: strang"),
        ({"pattern": "(a"}, "group"),
    ):
        with pytest.raises(SettingsError, match=f"cannot be used: [^|%]*{reason}$"):
            grammars(target).make(ask(schema=schema), False)


@pytest.mark.parametrize(("objects", "each", "told"), [(1, 1001, "An object"), (7, 900, "All")])
def test_large_schemas_are_refused_before_they_take_seconds(objects, each, told):
    properties = {f"p{number}": {"type": "string"} for number in range(each)}
    parts = [{"type": "object", "properties": properties}] * objects
    for more in (
        {"schema": {"anyOf": parts}},
        {"tools": [Tool("f", "", parts[0])], "schema": {"anyOf": parts[1:]}},
        {
            "tools": [Tool(f"f{at}", "", part) for at, part in enumerate(parts)],
            "tool_choice": "required",
        },
    ):
        with pytest.raises(RequestError, match=f"{told}.* properties"):
            grammars(make_target(json_tools)).make(ask(**more), False)
