"""Answers split into text, reasoning and calls."""

import importlib
import json
import pkgutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import tool_parsers
from mlx_lm.tool_parsers import json_tools, mistral
from serving import FakeEngine, client, make_target

from dflash_mlx.serve.harmony import HarmonyParser, uses_harmony
from dflash_mlx.serve.parts import AnswerParser, Reasoning, Text
from dflash_mlx.serve.request import Tool
from dflash_mlx.serve.tools import ToolCall, ToolSyntax

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [Tool("get_weather", "", SCHEMA), Tool("now")]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
# What each family writes to call get_weather(city="New York", days=3).
WRITTEN = {
    "json_tools": '\n{"name": "get_weather", "arguments": {"city": "New York", "days": 3}}\n',
    "qwen3_coder": "\n<function=get_weather>\n<parameter=city>\nNew York\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n",
    "glm47": "get_weather\n<arg_key>city</arg_key>\n<arg_value>New York</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    "mistral": 'get_weather[ARGS]{"city": "New York", "days": 3}',
    "pythonic": '[get_weather(city="New York", days=3)]',
    "kimi_k2": "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "New York", "days": 3}<|tool_call_end|>',
    "kimi_k3": '<|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
    '{"city": "New York", "days": 3}<|close|>json<|sep|><|close|>call<|sep|>',
    "longcat": "get_weather\n<longcat_arg_key>city</longcat_arg_key>"
    "<longcat_arg_value>New York</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>"
    "<longcat_arg_value>3</longcat_arg_value>",
    "minicpm5": '"get_weather"><param name="city">New York</param><param name="days">3</param>',
    "minimax_m2": '\n<invoke name="get_weather">\n<parameter name="city">New York</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n',
    "gemma4": 'call:get_weather{city:<|"|>New York<|"|>,days:3}',
    "function_gemma": "call:get_weather{city:<escape>New York<escape>,days:3}",
    "laguna": "get_weather\n<arg_key>city</arg_key>\n<arg_value>New York</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    "muse_spark": '<atem:invoke name="get_weather"><atem:parameter name="city">New York'
    '</atem:parameter><atem:parameter name="days">3</atem:parameter></atem:invoke>',
}
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def splitter(parser=json_tools, thinking=None, tools=TOOLS, parallel=True):
    target = make_target(parser, thinking=thinking)
    syntax = ToolSyntax.of(target.tokenizer)
    return AnswerParser(target.tokenizer, syntax, tools, thinking is not None, parallel)


def parts_of(split, rounds, truncated=False):
    """All parts, neighbours of a kind in one, and calls as (name, arguments)."""
    found = []
    for part in [one for text in rounds for one in split.feed(text)] + split.finish(truncated):
        if isinstance(part, ToolCall):
            found.append((part.name, json.loads(part.arguments)))
        elif found and type(found[-1]) is type(part):
            found[-1] = type(part)(found[-1].text + part.text)
        else:
            found.append(part)
    return found


def test_every_parser_of_mlx_lm_is_tried():
    assert set(WRITTEN) == {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)}


@pytest.mark.parametrize("family", WRITTEN)
def test_a_call_of_each_family_in_steps_of_any_size(family):
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{family}")
    text = f"Wait.{parser.tool_call_start}{WRITTEN[family]}{parser.tool_call_end}"
    wanted = [Text("Wait."), ("get_weather", {"city": "New York", "days": 3})]
    for width in (1, 3, 16, len(text)):
        rounds = [text[at : at + width] for at in range(0, len(text), width)]
        assert parts_of(splitter(parser), rounds) == wanted


def test_several_calls_have_different_ids():
    call = f"<tool_call>{WRITTEN['json_tools']}</tool_call>"
    split = splitter()
    calls = [one for one in split.feed(f"{call}\n{call}") if isinstance(one, ToolCall)]
    assert len(calls) == 2 and calls[0].id != calls[1].id
    assert (
        parts_of(splitter(), [f"{call}\n{call}"])
        == [("get_weather", {"city": "New York", "days": 3})] * 2
    )
    both = '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    assert parts_of(splitter(mistral), [f"[TOOL_CALLS]{both}"]) == [("now", {})] * 2


def test_one_call_without_parallel():
    assert parts_of(splitter(parallel=False), [CALL, CALL]) == [("now", {})]


@pytest.mark.parametrize(
    "body",
    [
        "no JSON",
        '{"name": "unknown", "arguments": {}}',
        '{"name": "now", "arguments": 3}',
        '{"name": "now", "arguments": "no JSON"}',
        '{"arguments": {}}',
        "[]",
        '{"name": {}}',
        "[" * 3000,
        "",
    ],
)
def test_text_that_does_not_parse_stays_text(body):
    text = f"Hm <tool_call>{body}</tool_call> so"
    split = splitter()
    assert parts_of(split, [text]) == [Text(text)] and split.calls == 0


def test_a_truncated_call_is_text():
    text = '<tool_call>{"name": "now", "arguments": {}}'
    assert parts_of(splitter(), [text], truncated=True) == [Text(text)]
    assert parts_of(splitter(), [text]) == [("now", {})]  # the end of the text ends it, too


def test_a_truncated_second_call_is_dropped():
    """A client has its call, and would show what is left of the next as the model's words."""
    text = f'{CALL}\n<tool_call>{{"na'
    for width in (1, len(text)):
        rounds = [text[at : at + width] for at in range(0, len(text), width)]
        assert parts_of(splitter(), rounds, truncated=True) == [("now", {})]


def test_without_tools_nothing_is_a_call():
    assert parts_of(splitter(tools=()), [CALL]) == [Text(CALL)]


def test_reasoning_is_separate_from_text():
    rounds = ["\nLet me", " see.\n", "</think>\n", "\nYes.\n"]
    assert parts_of(splitter(thinking="<think>"), rounds) == [
        Reasoning("Let me see."),
        Text("Yes.\n"),
    ]
    text = "<think>a</think>b<tool_call>{}</tool_call>"
    target = make_target(json_tools, thinking="")
    split = AnswerParser(target.tokenizer, ToolSyntax.of(target.tokenizer), TOOLS, False)
    assert parts_of(split, [text]) == [Reasoning("a"), Text("b<tool_call>{}</tool_call>")]


THINKS = make_target(json_tools, thinking="<think>\n")
PIECES = st.sampled_from(
    ["a", "\n", "<", "<tool", "<tool_call>", "</tool_call>", "<think>", "</think>", "{", "é", " "]
    + ['{"name": "now", "arguments": {}}']
)


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=12), st.integers(1, 9))
def test_step_borders_change_nothing(pieces, width):
    text = "".join(pieces)
    rounds = [text[at : at + width] for at in range(0, len(text), width)]
    syntax = ToolSyntax.of(THINKS.tokenizer)
    small, whole = (AnswerParser(THINKS.tokenizer, syntax, TOOLS, True) for _ in range(2))
    assert parts_of(small, rounds) == parts_of(whole, [text])


HARMONY = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Rome"}'
)
FINAL = "<|channel|>final<|message|>Warm."


@pytest.mark.parametrize("width", [1, 3, 16, 1000])
def test_channels_of_gpt_oss(width):
    rounds = [HARMONY[at : at + width] for at in range(0, len(HARMONY), width)]
    call = ("get_weather", {"city": "Rome"})
    parts = [Reasoning("Let me see."), Text("One moment."), call]
    assert parts_of(HarmonyParser(TOOLS), rounds) == parts
    assert parts_of(HarmonyParser(TOOLS), [FINAL]) == [Text("Warm.")]
    again = f"{HARMONY}<|call|><|start|>assistant{HARMONY}"
    assert parts_of(HarmonyParser(TOOLS), [again]) == parts * 2
    assert parts_of(HarmonyParser(TOOLS, parallel=False), [again]) == [*parts, *parts[:2]]


def test_messages_of_gpt_oss_that_are_not_calls_are_text():
    for wrong in (HARMONY[:-1], HARMONY.replace("get_weather", "other")):
        *_, last = parts_of(HarmonyParser(TOOLS), [wrong])
        assert isinstance(last, Text) and last.text.endswith(wrong[-9:])
    *_, last = parts_of(HarmonyParser(TOOLS), [HARMONY], truncated=True)
    assert isinstance(last, Text)


def test_gpt_oss_is_recognized_by_its_tokens():
    target = make_target()
    assert not uses_harmony(target.tokenizer)
    marks = ["<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>"]
    target.tokenizer.add_tokens(marks)
    engine = FakeEngine(target, [HARMONY])
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
    with client(engine) as server:
        answer = server.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Let me see."
    details = answer["usage"]["completion_tokens_details"]
    tokens = target.tokenizer.encode("Let me see.", add_special_tokens=False)
    assert details["reasoning_tokens"] == len(tokens)
