"""Calls in which a model has dropped or changed a small part of the syntax, in every family.

Each slip is a function of what was written right; the call is the same. Models are known for all of
them, in long contexts above all.
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
    """The text after a value."""
    return KNOWN[family].calls.value_end.strip()


def tag_of(family, key="path"):
    """The tag of an argument, up to its value."""
    return KNOWN[family].calls.key.split("{key}")[0] + key


def without_end(number):
    """A slip: the end of a value is missing."""

    def slip(family, text):
        end = end_of(family)
        parts = text.split(end_of(family))
        kept = [end] * (len(parts) - 1)
        kept[number] = ""
        return "".join(part + then for part, then in zip(parts, [*kept, ""], strict=True))

    return slip


def changed_ends(change):
    """A slip: values end with other tags."""

    def slip(family, text):
        ends = iter(ARGUMENTS)
        return re.sub(re.escape(end_of(family)), lambda end: change(end[0], next(ends)), text)

    return slip


def without_tail(family, text):
    return text.replace(KNOWN[family].calls.tail.strip() or "\0", "")


def with_head_that_ends(family, text):
    head = KNOWN[family].calls.head.strip().replace("{name}", "edit")
    return text.replace(head, re.sub(">$", "/>", head))


TAG_SLIPS = {
    "the call's tag ends itself": with_head_that_ends,
    "the first end is missing": without_end(0),
    "the last end is missing": without_end(1),
    "both are missing": lambda family, text: text.replace(end_of(family), ""),
    "all are missing": lambda family, text: without_tail(family, text.replace(end_of(family), "")),
    "the call's end is missing": without_tail,
    "ends end themselves": changed_ends(lambda end, key: end.replace(">", "/>")),
    "ends have the key's name": changed_ends(lambda end, key: f"</{key}>"),
    "the end tags of another family": changed_ends(lambda end, key: "</value>"),
    "ends are not ended": changed_ends(lambda end, key: end[:-1] + "\n"),
    "arguments are nested": lambda family, text: without_end(0)(family, text).replace(
        end_of(family), end_of(family) * 2
    ),
    "a key's tag is not ended": lambda family, text: re.sub(
        rf"({tag_of(family)}[^>]*)>\n?", r"\1\n", text, count=1
    ),
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
MISSING = [
    *(("kimi_k2", KIMI % marker) for marker in ("begin", "argument_begin", "end")),
    *(("kimi_k2", marker) for marker in ("functions.", ":0")),
    *(("deepseek_v3", DEEPSEEK % part) for part in ("begin", "end")),
    *(("deepseek_v31", DEEPSEEK % part) for part in ("begin", "end")),
    *(("deepseek_v3", marker) for marker in ("```json\n", "\n```<")),
    ("mistral", "[ARGS]"),
    ("minimax_m2", '"'),
    *(("glm47", marker) for marker in ("</arg_key>", "<arg_value>")),
    *(("qwen3_coder", marker) for marker in ("<tool_call>\n", "</tool_call>")),
    ("llama3", "<|python_tag|>"),
]


def without(part):
    """A slip: a part of the syntax is missing."""
    return lambda family, text: text.replace(part, part[-1] * (part[-1] == "<"))


def misnamed(family, text):
    """A slip: the name of the tool stands in the tag of an argument."""
    calls = KNOWN[family].calls
    tag = calls.key.replace("{text}", "true").replace("{key}", "edit")
    return text.replace(calls.head.strip().replace("{name}", "edit"), tag.strip())


SLIPS = [(family, "a tag is another", misnamed) for family in TAGGED if family != "glm47"]
SLIPS += [(family, name, slip) for family in TAGGED for name, slip in TAG_SLIPS.items()]
SLIPS += [(family, name, slip) for family in JSON for name, slip in JSON_SLIPS.items()]
SLIPS += [(family, f"{part} is missing", without(part)) for family, part in MISSING]
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
def test_a_call_with_a_slip_is_the_call(family, name, slip, width):
    call = ("edit", ARGUMENTS | {"old": 'if x < 1:\n    say "b"1'}) if "escaped" in name else CALL
    right = written(family, *CALL)
    text = slip(family, right)
    if "line breaks" in name:
        call = CALL
    assert read(form_of(family), schemas=SCHEMAS, text=text, width=width) == [call]
    if KNOWN[family].end and family != "harmony":  # the next call is not a part of it
        after = "read", {"file": "b"}
        parts = read(
            form_of(family), schemas=SCHEMAS, text=text + written(family, *after), width=width
        )
        assert parts == [call, after]


@pytest.mark.parametrize(
    "family", [marker for marker in WRITERS if KNOWN[marker].end and marker != "harmony"]
)
def test_markers_too_few_and_too_many(family):
    """Between two calls, or after one."""
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
def test_a_value_that_quotes_a_call_is_whole(family, width):
    """Also one with the tool's own arguments, as an agent writes them about its own syntax."""
    quoted = written(family, *CALL)
    for value in (quoted, f"First:\n{quoted}\n{quoted}\nand so on.", f"{end_of(family)} ends it."):
        call = ("edit", {"path": "a.py", "old": value, "new": value})
        assert read(form_of(family), schemas=SCHEMAS, text=written(family, *call), width=width) == [
            call
        ]
