"""Answers of every family split into text, reasoning and calls."""

import ast
import json

import pytest
from answers import JSON, KNOWN, TAGGED, WRITERS, form_of, read, written
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import make_target

from dflash_mlx.answers.families import AnswerFormat
from dflash_mlx.answers.parts import Reasoning, Text

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
SCHEMAS = {"get_weather": SCHEMA, "now": {}}
CALL = ("get_weather", {"city": "New York", "days": 3})
BARE = [family for family in WRITERS if KNOWN[family].openings]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("width", [1, 3, 1000])
def test_calls_in_steps_of_any_size(family, width):
    text = written(family, *CALL)
    assert read(form_of(family), schemas=SCHEMAS, text=text, width=width) == [CALL]
    several = "" if family in ("mistral", "llama3") else text
    assert read(form_of(family), schemas=SCHEMAS, text=text + several, width=width) == [CALL] * (
        2 if several else 1
    )


@pytest.mark.parametrize("family", BARE)
@pytest.mark.parametrize("end", [True, False])
def test_the_opening_marker_is_left_out(family, end):
    text = WRITERS[family](*CALL) + KNOWN[family].end * end
    for width in (1, 1000):
        assert read(form_of(family), schemas=SCHEMAS, text=text, width=width)[-1] == CALL
    other = WRITERS[family]("other", {"city": "x"})
    if KNOWN[family].openings[0] != "<|tool_call_begin|>" and "deepseek" not in family:
        assert read(form_of(family), SCHEMAS, other) == [Text(other)]


@pytest.mark.parametrize("family", [family for family in WRITERS if KNOWN[family].end])
def test_the_closing_marker_is_left_out(family):
    text = written(family, *CALL).removesuffix(KNOWN[family].end)
    assert read(form_of(family), SCHEMAS, text) == [CALL]
    assert read(form_of(family), SCHEMAS, text, truncated=True) == [Text(text)]
    # One that was forced is no text either: `max_tokens` ended the answer before there was one.
    assert read(form_of(family), SCHEMAS, text, truncated=True, forced=True) == []
    after = written(family, *CALL) + text[:-2]  # a client has no use for the rest
    assert read(form_of(family), SCHEMAS, after, truncated=True) == [CALL]


# The calls of Llama 3 are JSON, as answers may be.
@pytest.mark.parametrize("family", [family for family in WRITERS if family != "llama3"])
def test_tools_that_were_not_offered(family):
    good = written(family, *CALL)
    other = written(family, "other", {"a": "b"})
    if family == "mistral":
        other = "[TOOL_CALLS]" + WRITERS[family]("other", {"a": "b"})
    assert read(form_of(family), SCHEMAS, other + good) == [("other", {"a": "b"}), CALL]


@pytest.mark.parametrize("family", TAGGED)
def test_values_are_typed_by_the_schema(family):
    ways = {
        "string": {"type": "string"},
        "list": {"type": ["string", "null"]},
        "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "one": {"oneOf": [{"$ref": "#/$defs/name"}]},
        "all": {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]},
        "enum": {"enum": ["null", "123", "true"]},
        "const": {"const": "123"},
        "ref": {"$ref": "#/$defs/name"},
        "cycle": {"anyOf": [{"$ref": "#/$defs/cycle"}, {"type": "string"}]},
    }
    defined = {"name": {"type": "string"}, "cycle": {"allOf": [{"$ref": "#/$defs/cycle"}]}}
    defined["cycle"]["type"] = "string"
    schema = {"type": "object", "properties": ways, "$defs": defined}
    for word in ("123", "true", "[1]", " 1.50"):
        arguments = dict.fromkeys(ways, word)
        text = written(family, "f", arguments)
        assert read(form_of(family), {"f": schema}, text) == [("f", arguments)]
    nulls = {way: "null" for way in ways if way not in ("list", "any")}
    text = written(family, "f", nulls)
    assert read(form_of(family), {"f": schema}, text) == [("f", nulls)]


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("schema", "word", "value"),
    [
        ({"type": "integer"}, "1234567890123456789", 1234567890123456789),
        ({"type": "number"}, "1234567890123456789", 1234567890123456789),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "2026-01-15", "2026-01-15"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": "integer, string"}, "7", 7),  # ollama 0.6.3 writes `int | str` like this
        ({"type": "string, integer"}, "true", "true"),
        ({"type": "boolean, string"}, "7", "7"),
        ({"type": "array", "items": {"type": "integer"}}, "['a', 1.0]", ["a", 1]),
        ({"type": "object"}, '{"a": "x\ny"}', {"a": "x\ny"}),
        ({}, "{}", {}),
        ({}, '"a"', '"a"'),
    ],
)
def test_values_that_are_not_strings(family, schema, word, value):
    text = written(family, "f", {"x": word}).replace('string="true"', 'string="false"')
    schemas = {"f": {"properties": {"x": schema}}}
    assert read(form_of(family), schemas, text) == [("f", {"x": value})]


@pytest.mark.parametrize("family", JSON)
def test_json_as_other_servers_read_it(family):
    def calls(text, name="f"):
        inside = WRITERS[family](name, {}).replace("{}", text)
        form = form_of(family)
        return read(form, {"f": {}}, KNOWN[family].start + inside + KNOWN[family].end)

    assert calls('{"x": "one\ntwo\tthree"}') == [("f", {"x": "one\ntwo\tthree"})]
    numbers = [1, "NaN", "-Infinity", "1e999", 3.5]
    assert calls('{"y": [1, NaN, -Infinity, 1e999, 3.5]}') == [("f", {"y": numbers})]
    assert calls("null") == calls('""') == [("f", {})]
    assert calls('{"a": "\\ud83d\\ude00 \\ud83d"}') == [("f", {"a": "😀 \ufffd"})]
    assert calls('"{\\"a\\": 1}"') == [("f", {"a": 1})]
    for wrong in ("3", "[1]", '"text"', '{"a', "[" * 3000):
        (text,) = calls(wrong)
        assert isinstance(text, Text) and wrong in text.text


def test_arguments_by_other_names_and_without_any():
    for family, text in {
        "json_tools": '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        "llama3": '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
        "glm47": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    }.items():
        assert read(form_of(family), {"f": {}}, text) == [("f", {"a": 1})]
    text = written("kimi_k2", "f", {}).replace("{}", "")
    assert read(form_of("kimi_k2"), {"f": {}}, text) == [("f", {})]
    named = '{"name": "f", "input": {"a": 1}}'
    for wrong in (named, '{"arguments": {}}', "[]", '{"name": {}}', ""):
        text = f"Hm <tool_call>{wrong}</tool_call> so"
        assert read(form_of("json_tools"), {"f": {}}, text) == [Text(text)]


@pytest.mark.parametrize("family", WRITERS)
def test_broken_calls_and_words_around_calls_are_text(family):
    """A broken call is text, and so are words after a call; a thought may mention a marker."""
    answer_family = KNOWN[family]
    call = written(family, "f", {"a": "b"})
    if family not in ("mistral", "llama3", "harmony"):
        broken = f"{answer_family.start}broken {{ {answer_family.end}"
        parts = read(form_of(family), {"f": {}}, broken + call)
        assert parts == [Text(broken), ("f", {"a": "b"})]
    if family in ("mistral", "llama3", "nemotron", "kimi_k2", "pythonic", "qwen3_coder"):
        inside = (
            f"{answer_family.start}{WRITERS[family]('f', {'a': 'b'})} So much. {answer_family.end}"
        )
        parts = read(form_of(family), {"f": {}}, inside)
        assert parts[0] == ("f", {"a": "b"}) and parts[1].text.strip() == "So much."
    if family not in ("llama3", "harmony"):
        text = f"A {answer_family.start} it is.</think>Yes."
        parts = read(form_of(family), {"f": {}}, text, starts_in_reasoning=True)
        assert parts == [Reasoning(f"A {answer_family.start} it is."), Text("Yes.")]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("name", ["mcp__fs__read", "fs.read", "fs:read", "read-file"])
def test_names_as_agents_use_them(family, name):
    arguments = {"-n": True, "a.b": "x", "$ref": 1, "o": ["x", {"k-v": None}], "\u043a": "é"}
    schemas = {name: {"properties": {"a.b": {"type": "string"}}}}
    text = written(family, name, arguments)
    assert read(form_of(family), schemas, text) == [(name, arguments)]


def test_gemma_takes_the_keys_of_agents():
    text = '<|tool_call>call:fs:read{\n -n:true, a.b: 1,\n$ref:<|"|>x, }<|"|>,o:{file-path:a.py}}'
    expected = {"-n": True, "a.b": 1, "$ref": "x, }", "o": {"file-path": "a.py"}}
    assert read(form_of("gemma4"), {"fs:read": {}}, text + "<tool_call|>") == [
        ("fs:read", expected)
    ]


def test_strings_of_lfm_may_have_their_quotes():
    """Its template writes strings in quotes, and escapes nothing."""
    text = "<|tool_call_start|>[f(a='it's \n\"x\", y', b={'c': ['d'e', 1]})]<|tool_call_end|>"
    expected = {"a": 'it\'s \n"x", y', "b": {"c": ["d'e", 1]}}
    assert read(form_of("pythonic"), {"f": {}}, text) == [("f", expected)]


def test_several_calls_in_a_block():
    for family in ("qwen3_coder", "kimi_k2", "minimax_m2", "deepseek_v4", "muse_spark", "gemma4"):
        both = "".join(WRITERS[family]("now", {"path": path}) for path in ("old", "new"))
        text = KNOWN[family].start + both + KNOWN[family].end
        old, new = (("now", {"path": path}) for path in ("old", "new"))
        assert read(form_of(family), SCHEMAS, text) == [old, new]
        assert read(form_of(family), SCHEMAS, text, parallel=False) == [old]


PIECES = st.sampled_from(
    ["a", "é", "字", "\n", "\t", "  ", '"', "'", "\\", "{", "}", "[", ")", ",", ":", "<", "null"]
    + ["</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function=edit>", "</invoke>"]
    + ["</atem:parameter>", "</arg_value>", "<think>", "</think>", "[TOOL_CALLS]", "</TOOLCALL>"]
    + ["<|tool_call_end|>", "</｜DSML｜parameter>", "<tool_call|>", "\r\n", "\x00"]
)
TEXTS = st.lists(PIECES, max_size=9).map("".join)


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=12, deadline=None)
@given(old=TEXTS, new=TEXTS, width=st.integers(1, 9))
def test_a_call_is_what_was_written(family, old, new, width):
    arguments = {"path": "a.py", "old": old, "new": new}
    schema = {"properties": dict.fromkeys(arguments, {"type": "string"})}
    text = written(family, "edit", arguments)
    parts = read(form_of(family), schemas={"edit": schema}, text=text, width=width)
    assert parts == read(form_of(family), {"edit": schema}, text)
    assert parts == [("edit", arguments)]


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=12, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), width=st.integers(1, 9))
def test_nothing_is_lost_and_step_borders_change_nothing(family, pieces, width):
    text = "".join(pieces)
    form = form_of(family, ("", ""))
    small, whole = (
        read(form, schemas={"edit": {}}, text=text, width=size) for size in (width, 1000)
    )
    assert small == whole
    said = "".join(part.text for part in whole if isinstance(part, Text))
    if not any(isinstance(part, tuple) for part in whole) and family != "harmony":
        assert said == text


def test_parsers_of_mlx_lm_read_the_other_families():
    text = "<longcat_tool_call>f\n<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>1"
    text += "</longcat_arg_value>\n</longcat_tool_call>"
    form = AnswerFormat.of(make_target("longcat").tokenizer)
    assert read(form, {"f": {}}, text) == [("f", {"a": 1})]


STRINGS = [
    "plain",
    "x, y)",
    "two\nlines",
    'say "hi" ',
    "it's",
    "\\d+\\s",
    "tab\there",
    "é🙂",
    "",
    "a='b'",
]


def spelled(text: str) -> list[str]:
    """Ways to write a string in Python."""
    literals = [repr(text), json.dumps(text, ensure_ascii=False)]
    for quote in ('"""', "'''"):
        if quote not in text and not text.endswith(quote[0]):
            if "\\" not in text:
                literals += [f"{quote}{text}{quote}", f"u{quote}{text}{quote}"]
            literals.append(f"r{quote}{text}{quote}")
            escaped = text.replace("\\", "\\\\")
            escaped = text.replace("\\", "\\\\")
            literals.append(f"{quote}\\\n{escaped}{quote}")
    for quote in "\"'":
        if quote not in text and "\n" not in text:
            literals += [f"r{quote}{text}{quote}", f"R{quote}{text}{quote}"]
    return literals


@pytest.mark.parametrize("text", STRINGS)
def test_pythonic_strings_are_those_that_python_reads(text: str) -> None:
    for source in spelled(text):
        assert ast.literal_eval(source) == text
        for value, wanted in ((source, text), (f"[{source}, ({source}, 1)]", [text, [text, 1]])):
            written = f"<|tool_call_start|>[f(a={value}, b=2)]<|tool_call_end|>"
            parts = read(form_of("pythonic"), {"f": {}}, written)
            assert parts == [("f", {"a": wanted, "b": 2})], source


@pytest.mark.parametrize(
    "written",
    [
        '[{"name": "f", "arguments": {"a": "x"}}]',
        '{"name": "f", "arguments": {"a": "x"}}',
        '[{"name": "f", "parameters": "{\\"a\\": \\"x\\"}"}]',
        '```json\n[{"name": "f", "arguments": {"a": "x"}}]\n```',
        '[f(a="x")]',
        "f(a=('x'))",
    ],
)
def test_lfm2_also_writes_json_between_its_markers(written: str) -> None:
    text = f"<|tool_call_start|>{written}<|tool_call_end|>"
    assert read(form_of("pythonic"), {"f": {}}, text) == [("f", {"a": "x"})]


@pytest.mark.parametrize("between", [" ", "\n    "])
def test_pythonic_strings_in_a_row_are_one(between: str) -> None:
    for pieces in (["'it'", "'s'"], ['"a, b)"', "'c'", 'r"\\d"'], ["'x'", "'=\\'y\\''"]):
        source = between.join(pieces)
        written = f"<|tool_call_start|>[f(a=[{source}, 1], b={source})]<|tool_call_end|>"
        text = ast.literal_eval(f"({source})")
        assert read(form_of("pythonic"), {"f": {}}, written) == [("f", {"a": [text, 1], "b": text})]


NUMBERS = ["0x1F", "-0x10", "0b101", "0o17", "1_000", "+5", "-2", "1_0.5", ".5", "5.", "1e3"]


@pytest.mark.parametrize("source", NUMBERS)
def test_pythonic_numbers_are_those_that_python_reads(source: str) -> None:
    """Where the tool takes numbers; a text stays as it was written."""
    written = f"<|tool_call_start|>[f(a={source}, b={source})]<|tool_call_end|>"
    schema = {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}}
    ((_, arguments),) = read(form_of("pythonic"), {"f": schema}, written)
    assert arguments == {"a": ast.literal_eval(source), "b": source}


@pytest.mark.parametrize("family", [name for name in TAGGED if KNOWN[name].calls.tail])
@pytest.mark.parametrize("ending", ["/>", " />"])
def test_a_tag_that_ends_itself_is_a_call_without_arguments(family, ending):
    """Also where another call follows."""
    syntax = KNOWN[family].calls
    whole = written(family, "f", {})
    head = syntax.head.strip().replace("{name}", "f")
    tail = syntax.tail.strip()
    assert whole.count(head) == whole.count(tail) == 1
    before, rest = whole.split(head)
    after = rest.split(tail)[1]
    short = head.removesuffix(">") + ending
    for calls, count in ((short, 1), (f"{short}\n{short}", 2), (f"{short}\n{head}\n{tail}", 2)):
        text = before + calls + after
        assert read(form_of(family), {"f": {}}, text) == [("f", {})] * count, text


FOUR = {"properties": {name: {} for name in "abcd"}, "required": ["a"]}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("'x'", {"a": "x"}),
        ("'b=1', 2", {"a": "b=1", "b": 2}),
        ("'x', [1, 'y'], c={'k': 'v'}", {"a": "x", "b": [1, "y"], "c": {"k": "v"}}),
        ("None, d=True,", {"a": None, "d": True}),
        ("-1, (2, 3), 'z', 4", {"a": -1, "b": [2, 3], "c": "z", "d": 4}),
        ("'it' 's', \"b\"=1", {"a": "its", "b": 1}),
        ("", {}),
    ],
)
def test_pythonic_arguments_without_keys_are_in_the_order_of_the_tools(written, arguments):
    text = f"<|tool_call_start|>[f({written}), f(a=1)]<|tool_call_end|>"
    assert read(form_of("pythonic"), {"f": FOUR}, text) == [("f", arguments), ("f", {"a": 1})]


@pytest.mark.parametrize("written", ["1, 2, 3, 4, 5", "a=1, 2"])
def test_pythonic_arguments_that_no_parameter_takes(written):
    text = f"<|tool_call_start|>[f({written})]<|tool_call_end|>"
    assert read(form_of("pythonic"), {"f": FOUR}, text) == [Text(text)]


@pytest.mark.parametrize("arguments", ["[]", '"[]"', "null", '""', "{}"])
def test_a_call_without_arguments(arguments: str) -> None:
    """An empty list is what PHP makes of an empty object."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert read(form_of("json_tools"), {"f": {}}, text) == [("f", {})]
