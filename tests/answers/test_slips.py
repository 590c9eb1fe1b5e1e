"""Calls in which a model has dropped or changed a small part of the syntax, in every family.

Each slip is a function (family, text) that changes a correct call. The call must be recognized
nevertheless. Models make all of these mistakes, mostly in long contexts.
"""

import re

import pytest
from answers import JSON, KNOWN, TAGGED, WRITERS, form_of, read, written

SCHEMA = {
    "type": "object",
    "properties": dict.fromkeys(("path", "old", "new"), {"type": "string"}),
    "required": ["path", "old"],
}
SCHEMAS = {"edit": SCHEMA, "read": {"properties": {"file": {"type": "string"}}}}
ARGUMENTS = {"path": "a.py", "old": "if x < 1:\n    <b>1</b>"}
CALL = ("edit", ARGUMENTS)


def end_of(family):
    """The markup that ends a value."""
    return KNOWN[family].calls.value_end.strip()


def tag_of(family, key="path"):
    """The beginning of an argument's tag, up to and including its name."""
    return KNOWN[family].calls.key.split("{key}")[0] + key


def without_end(number):
    """A slip: the end of the value with this number is missing."""

    def slip(family, text):
        end = end_of(family)
        parts = text.split(end)
        before = end.join(parts[: number + 1])
        after = end.join(parts[number + 1 :])
        return before + after

    return slip


def changed_ends(change):
    """A slip: values end with other tags, which `change` makes of (end, key)."""

    def slip(family, text):
        keys = iter(ARGUMENTS)

        def changed(match):
            return change(match[0], next(keys))

        return re.sub(re.escape(end_of(family)), changed, text)

    return slip


def without_ends(family, text):
    """A slip: the ends of all values are missing."""
    return text.replace(end_of(family), "")


def without_tail(family, text):
    """A slip: the end of the call is missing, if the family has one."""
    tail = KNOWN[family].calls.tail.strip()
    return text.replace(tail, "") if tail else text


def without_ends_and_tail(family, text):
    return without_tail(family, without_ends(family, text))


def nested_arguments(family, text):
    """A slip: both values end after the second."""
    end = end_of(family)
    return without_end(0)(family, text).replace(end, end * 2)


def with_unfinished_key_tag(family, text):
    """A slip: the first argument's tag has no closing bracket."""
    return re.sub(rf"({tag_of(family)}[^>]*)>\n?", r"\1\n", text, count=1)


def with_self_closing_head(family, text):
    """A slip: the call's first tag closes itself."""
    head = KNOWN[family].calls.head.strip().replace("{name}", "edit")
    return text.replace(head, re.sub(">$", "/>", head))


TAG_SLIPS = {
    "the call's tag ends itself": with_self_closing_head,
    "the first end is missing": without_end(0),
    "the last end is missing": without_end(1),
    "both are missing": without_ends,
    "all are missing": without_ends_and_tail,
    "the call's end is missing": without_tail,
    "ends end themselves": changed_ends(lambda end, key: end.replace(">", "/>")),
    "ends have the key's name": changed_ends(lambda end, key: f"</{key}>"),
    "the end tags of another family": changed_ends(lambda end, key: "</value>"),
    "ends are not ended": changed_ends(lambda end, key: end[:-1] + "\n"),
    "arguments are nested": nested_arguments,
    "a key's tag is not ended": with_unfinished_key_tag,
}


def in_json(change):
    """A slip in the JSON that a family writes."""

    def slip(family, text):
        brace = text.index("{")
        end = text.rindex("}") + 1
        return text[:brace] + change(text[brace:end]) + text[end:]

    return slip


JSON_SLIPS = {
    "a bracket is missing": in_json(lambda json: json[:-1]),
    "a bracket is too many": in_json(lambda json: json + "}"),
    "a comma is too many": in_json(lambda json: json[:-1] + ",}"),
    "a comma is missing": in_json(lambda json: json.replace('", "old"', '" "old"')),
    "quotes are Python's": in_json(lambda json: json.replace('"', "'")),
    "quotes are not escaped": in_json(
        lambda json: json.replace("<b>", 'say "b"').replace("</b>", "")
    ),
    "line breaks are not escaped": in_json(lambda json: json.replace("\\n", "\n")),
    "it is in a block of code": in_json(lambda json: f"```json\n{json}\n```"),
}

KIMI = "<|tool_call_%s|>"
DEEPSEEK = "<｜tool▁call▁%s｜>"
# Parts of the syntax that may be missing.
OPTIONAL_PARTS = {
    "kimi_k2": [
        KIMI % "begin",
        KIMI % "argument_begin",
        KIMI % "end",
        "functions.",
        ":0",
    ],
    "deepseek_v3": [DEEPSEEK % "begin", DEEPSEEK % "end", "```json\n", "\n```<"],
    "deepseek_v31": [DEEPSEEK % "begin", DEEPSEEK % "end"],
    "mistral": ["[ARGS]"],
    "minimax_m2": ['"'],
    "glm47": ["</arg_key>", "<arg_value>"],
    "qwen3_coder": ["<tool_call>\n", "</tool_call>"],
    "llama3": ["<|python_tag|>"],
}


def without(part):
    """A slip: a part of the syntax is missing. A "<" at its end begins the next part, and stays."""

    def slip(family, text):
        return text.replace(part, "<" if part.endswith("<") else "")

    return slip


def misnamed(family, text):
    """A slip: the name of the tool stands in the tag of an argument."""
    calls = KNOWN[family].calls
    tag = calls.key.replace("{text}", "true").replace("{key}", "edit")
    return text.replace(calls.head.strip().replace("{name}", "edit"), tag.strip())


# Each slip as (family, its name, the function).
SLIPS = [(family, "a tag is another", misnamed) for family in TAGGED if family != "glm47"]
SLIPS += [(family, name, slip) for family in TAGGED for name, slip in TAG_SLIPS.items()]
SLIPS += [(family, name, slip) for family in JSON for name, slip in JSON_SLIPS.items()]
for family, parts in OPTIONAL_PARTS.items():
    SLIPS += [(family, f"{part} is missing", without(part)) for part in parts]
SLIPS += [(family, "unknown end tags", changed_ends(lambda end, key: "</x>")) for family in TAGGED]
SLIPS.remove(("nemotron", "it is in a block of code", JSON_SLIPS["it is in a block of code"]))
SLIPS += [("harmony", name, JSON_SLIPS[name]) for name in list(JSON_SLIPS)[:7]]
SLIPS += [
    ("gemma4", "a bracket is missing", lambda family, text: text.replace("}<tool", "<tool")),
    ("pythonic", "a bracket is missing", lambda family, text: text.replace(")]", "]")),
]


@pytest.mark.parametrize(
    ("family", "name", "slip"), SLIPS, ids=[f"{family}-{name}" for family, name, _ in SLIPS]
)
@pytest.mark.parametrize("width", [1, 1000])
def test_a_call_with_a_slip_is_recognized(family, name, slip, width):
    call = CALL
    if name == "quotes are not escaped":  # this slip changes the value as well
        call = ("edit", ARGUMENTS | {"old": 'if x < 1:\n    say "b"1'})
    text = slip(family, written(family, *CALL))
    assert read(form_of(family), schemas=SCHEMAS, text=text, width=width) == [call]
    if KNOWN[family].end and family != "harmony":  # a second call does not become part of it
        second = ("read", {"file": "b"})
        text += written(family, *second)
        parts = read(form_of(family), schemas=SCHEMAS, text=text, width=width)
        assert parts == [call, second]


@pytest.mark.parametrize(
    "family", [marker for marker in WRITERS if KNOWN[marker].end and marker != "harmony"]
)
def test_missing_and_repeated_markers_between_calls_do_not_matter(family):
    start = KNOWN[family].start
    end = KNOWN[family].end
    first = written(family, *CALL)
    second = written(family, "read", {"file": "b"})
    calls = [CALL, ("read", {"file": "b"})]
    assert read(form_of(family), SCHEMAS, first.replace(end, "") + second) == calls
    assert read(form_of(family), SCHEMAS, first + end + second + end) == calls
    assert CALL in read(form_of(family), SCHEMAS, start + first)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize("width", [1, 1000])
def test_a_value_that_quotes_a_call_stays_whole(family, width):
    """An agent may edit a file about the syntax of calls. It may quote the same tool's."""
    quoted = written(family, *CALL)
    for value in (quoted, f"First:\n{quoted}\n{quoted}\nand so on.", f"{end_of(family)} ends it."):
        call = ("edit", {"path": "a.py", "old": value, "new": value})
        text = written(family, *call)
        assert read(form_of(family), schemas=SCHEMAS, text=text, width=width) == [call]
