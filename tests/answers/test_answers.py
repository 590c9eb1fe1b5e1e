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
# Families whose calls are recognized without the opening marker.
RECOGNIZED_WITHOUT_MARKER = [family for family in WRITERS if KNOWN[family].openings]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("width", [1, 3, 1000])
def test_calls_in_steps_of_any_size(family, width):
    text = written(family, *CALL)
    assert read(form_of(family), schemas=SCHEMAS, text=text, width=width) == [CALL]
    if family not in ("mistral", "llama3"):  # these write several calls in another way
        twice = read(form_of(family), schemas=SCHEMAS, text=text + text, width=width)
        assert twice == [CALL, CALL]


@pytest.mark.parametrize("family", RECOGNIZED_WITHOUT_MARKER)
@pytest.mark.parametrize("has_end", [True, False])
def test_a_call_without_its_opening_marker_is_recognized(family, has_end):
    text = WRITERS[family](*CALL)
    if has_end:
        text += KNOWN[family].end
    for width in (1, 1000):
        assert read(form_of(family), schemas=SCHEMAS, text=text, width=width)[-1] == CALL
    # Where the rest of a call has no markers, only the name of an offered tool makes it one.
    other = WRITERS[family]("other", {"city": "x"})
    if KNOWN[family].openings[0] != "<|tool_call_begin|>" and "deepseek" not in family:
        assert read(form_of(family), SCHEMAS, other) == [Text(other)]


@pytest.mark.parametrize("family", [family for family in WRITERS if KNOWN[family].end])
def test_a_call_without_its_closing_marker_is_a_call_unless_the_answer_was_truncated(family):
    text = written(family, *CALL).removesuffix(KNOWN[family].end)
    assert read(form_of(family), SCHEMAS, text) == [CALL]
    assert read(form_of(family), SCHEMAS, text, truncated=True) == [Text(text)]
    # The beginning of a forced call is not shown as text: the client expects a call only.
    assert read(form_of(family), SCHEMAS, text, truncated=True, forced=True) == []
    # Nor is the beginning of a second call: a client has no use for it.
    second_is_cut = written(family, *CALL) + text[:-2]
    assert read(form_of(family), SCHEMAS, second_is_cut, truncated=True) == [CALL]


# Without Llama 3, whose calls are plain JSON: only offered tools tell them from JSON answers.
@pytest.mark.parametrize("family", [family for family in WRITERS if family != "llama3"])
def test_calls_of_tools_that_were_not_offered_are_calls(family):
    good = written(family, *CALL)
    other = written(family, "other", {"a": "b"})
    if family == "mistral":
        other = "[TOOL_CALLS]" + WRITERS[family]("other", {"a": "b"})
    assert read(form_of(family), SCHEMAS, other + good) == [("other", {"a": "b"}), CALL]


@pytest.mark.parametrize("family", TAGGED)
def test_values_of_string_parameters_stay_strings(family):
    """However the schema says that a parameter is a string."""
    string_types = {
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
    schema = {"type": "object", "properties": string_types, "$defs": defined}
    for word in ("123", "true", "[1]", " 1.50"):
        arguments = dict.fromkeys(string_types, word)
        text = written(family, "f", arguments)
        assert read(form_of(family), {"f": schema}, text) == [("f", arguments)]
    nulls = {name: "null" for name in string_types if name not in ("list", "any")}
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
def test_other_values_get_the_type_of_the_schema_if_they_fit_it(family, schema, word, value):
    text = written(family, "f", {"x": word}).replace('string="true"', 'string="false"')
    schemas = {"f": {"properties": {"x": schema}}}
    assert read(form_of(family), schemas, text) == [("f", {"x": value})]


@pytest.mark.parametrize("family", JSON)
def test_lenient_json_is_read_as_in_other_servers(family):
    """Line breaks in strings, numbers that JSON does not have, and arguments in a string."""

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


def test_arguments_may_have_another_name_or_be_missing():
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
        text = f"Hm <tool_call>{wrong}</tool_call> so"  # which is no call
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
        words = f"{WRITERS[family]('f', {'a': 'b'})} Words."
        inside = f"{answer_family.start}{words} {answer_family.end}"
        parts = read(form_of(family), {"f": {}}, inside)
        assert parts[0] == ("f", {"a": "b"}) and parts[1].text.strip() == "Words."
    if family not in ("llama3", "harmony"):
        text = f"A {answer_family.start} it is.</think>Yes."
        parts = read(form_of(family), {"f": {}}, text, starts_in_reasoning=True)
        assert parts == [Reasoning(f"A {answer_family.start} it is."), Text("Yes.")]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("name", ["mcp__fs__read", "fs.read", "fs:read", "read-file"])
def test_names_of_tools_and_arguments_may_have_special_characters(family, name):
    """As those of coding agents do."""
    arguments = {"-n": True, "a.b": "x", "$ref": 1, "o": ["x", {"k-v": None}], "\u043a": "é"}
    schemas = {name: {"properties": {"a.b": {"type": "string"}}}}
    text = written(family, name, arguments)
    assert read(form_of(family), schemas, text) == [(name, arguments)]


def test_gemmas_keys_may_have_special_characters():
    text = '<|tool_call>call:fs:read{\n -n:true, a.b: 1,\n$ref:<|"|>x, }<|"|>,o:{file-path:a.py}}'
    expected = {"-n": True, "a.b": 1, "$ref": "x, }", "o": {"file-path": "a.py"}}
    assert read(form_of("gemma4"), {"fs:read": {}}, text + "<tool_call|>") == [
        ("fs:read", expected)
    ]


def test_strings_of_lfm_may_contain_quotes():
    """Its template puts strings in quotes, and escapes nothing."""
    text = "<|tool_call_start|>[f(a='it's \n\"x\", y', b={'c': ['d'e', 1]})]<|tool_call_end|>"
    expected = {"a": 'it\'s \n"x", y', "b": {"c": ["d'e", 1]}}
    assert read(form_of("pythonic"), {"f": {}}, text) == [("f", expected)]


def test_several_calls_in_a_block():
    for family in ("qwen3_coder", "kimi_k2", "minimax_m2", "deepseek_v4", "muse_spark", "gemma4"):
        first = ("now", {"path": "old"})
        second = ("now", {"path": "new"})
        both = WRITERS[family](*first) + WRITERS[family](*second)
        text = KNOWN[family].start + both + KNOWN[family].end
        assert read(form_of(family), SCHEMAS, text) == [first, second]
        assert read(form_of(family), SCHEMAS, text, parallel=False) == [first]


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
def test_the_arguments_of_a_call_are_those_that_were_written(family, old, new, width):
    arguments = {"path": "a.py", "old": old, "new": new}
    schema = {"properties": dict.fromkeys(arguments, {"type": "string"})}
    text = written(family, "edit", arguments)
    parts = read(form_of(family), schemas={"edit": schema}, text=text, width=width)
    assert parts == read(form_of(family), {"edit": schema}, text)
    assert parts == [("edit", arguments)]


@pytest.mark.parametrize("family", WRITERS)
@settings(max_examples=12, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), width=st.integers(1, 9))
def test_no_text_is_lost_and_steps_of_any_size_give_the_same_parts(family, pieces, width):
    text = "".join(pieces)
    form = form_of(family, ("", ""))
    in_steps = read(form, schemas={"edit": {}}, text=text, width=width)
    whole = read(form, schemas={"edit": {}}, text=text, width=1000)
    assert in_steps == whole
    shown = "".join(part.text for part in whole if isinstance(part, Text))
    has_call = any(isinstance(part, tuple) for part in whole)
    if not has_call and family != "harmony":
        assert shown == text


def test_families_without_a_parser_of_ours_are_read_by_mlx_lms():
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


def python_literals(text: str) -> list[str]:
    """Several ways to write a string in Python."""
    literals = [repr(text), json.dumps(text, ensure_ascii=False)]
    for quote in ('"""', "'''"):
        if quote not in text and not text.endswith(quote[0]):
            if "\\" not in text:
                literals += [f"{quote}{text}{quote}", f"u{quote}{text}{quote}"]
            literals.append(f"r{quote}{text}{quote}")
            escaped = text.replace("\\", "\\\\")
            literals.append(f"{quote}\\\n{escaped}{quote}")
    for quote in "\"'":
        if quote not in text and "\n" not in text:
            literals += [f"r{quote}{text}{quote}", f"R{quote}{text}{quote}"]
    return literals


@pytest.mark.parametrize("text", STRINGS)
def test_pythonic_strings_are_those_that_python_reads(text: str) -> None:
    for literal in python_literals(text):
        assert ast.literal_eval(literal) == text
        nested = f"[{literal}, ({literal}, 1)]"
        for value, expected in ((literal, text), (nested, [text, [text, 1]])):
            written = f"<|tool_call_start|>[f(a={value}, b=2)]<|tool_call_end|>"
            parts = read(form_of("pythonic"), {"f": {}}, written)
            assert parts == [("f", {"a": expected, "b": 2})], literal


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
def test_adjacent_pythonic_strings_are_joined(between: str) -> None:
    for pieces in (["'it'", "'s'"], ['"a, b)"', "'c'", 'r"\\d"'], ["'x'", "'=\\'y\\''"]):
        source = between.join(pieces)
        written = f"<|tool_call_start|>[f(a=[{source}, 1], b={source})]<|tool_call_end|>"
        text = ast.literal_eval(f"({source})")
        assert read(form_of("pythonic"), {"f": {}}, written) == [("f", {"a": [text, 1], "b": text})]


NUMBERS = ["0x1F", "-0x10", "0b101", "0o17", "1_000", "+5", "-2", "1_0.5", ".5", "5.", "1e3"]


@pytest.mark.parametrize("source", NUMBERS)
def test_pythonic_numbers_are_those_that_python_reads(source: str) -> None:
    """If the parameter is a number. The value of a string parameter stays as it was written."""
    written = f"<|tool_call_start|>[f(a={source}, b={source})]<|tool_call_end|>"
    schema = {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}}
    ((_, arguments),) = read(form_of("pythonic"), {"f": schema}, written)
    assert arguments == {"a": ast.literal_eval(source), "b": source}


@pytest.mark.parametrize("family", [name for name in TAGGED if KNOWN[name].calls.tail])
@pytest.mark.parametrize("ending", ["/>", " />"])
def test_a_self_closing_tag_is_a_call_without_arguments(family, ending):
    """Even if another call follows."""
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


FOUR_PARAMETERS = {"properties": {name: {} for name in "abcd"}, "required": ["a"]}


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
def test_pythonic_arguments_without_keys_are_in_the_order_of_the_parameters(written, arguments):
    text = f"<|tool_call_start|>[f({written}), f(a=1)]<|tool_call_end|>"
    assert read(form_of("pythonic"), {"f": FOUR_PARAMETERS}, text) == [
        ("f", arguments),
        ("f", {"a": 1}),
    ]


@pytest.mark.parametrize("written", ["1, 2, 3, 4, 5", "a=1, 2"])
def test_a_pythonic_call_with_too_many_arguments_is_text(written):
    text = f"<|tool_call_start|>[f({written})]<|tool_call_end|>"
    assert read(form_of("pythonic"), {"f": FOUR_PARAMETERS}, text) == [Text(text)]


@pytest.mark.parametrize("arguments", ["[]", '"[]"', "null", '""', "{}"])
def test_empty_arguments_may_be_written_in_several_ways(arguments: str) -> None:
    """PHP, for example, writes an empty object as an empty list."""
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert read(form_of("json_tools"), {"f": {}}, text) == [("f", {})]
