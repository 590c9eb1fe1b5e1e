"""Tool calls as each family writes them, for tests of the parser of answers."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_mlx.answers.families import FAMILIES, AnswerFormat
from dflash_mlx.answers.parser import AnswerParser
from dflash_mlx.answers.parts import ToolCall, merge_texts

KNOWN = {family.name: family for family in FAMILIES}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return _json(value)


# The text between a family's markers. In these families, arguments are JSON.
CALLS = {
    "json_tools": '\n{"name": "NAME", "arguments": JSON}\n',
    "llama3": '{"name": "NAME", "parameters": JSON}',
    "nemotron": '[{"name": "NAME", "arguments": JSON}]',
    "mistral": "NAME[ARGS]JSON",
    "kimi_k2": "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON"
    "<|tool_call_end|>",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```"
    "<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>",
}
JSON = [family for family in CALLS if family != "harmony"]
# In these families, a call has a beginning, a text for each argument, and an end.
TAGS = {
    "deepseek_v32": (
        '\n<｜DSML｜invoke name="NAME">\n',
        '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n",
    ),
    "qwen3_coder": (
        "\n<function=NAME>\n",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        "</function>\n",
    ),
    "glm47": ("NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", ""),
    "minimax_m2": (
        '\n<invoke name="NAME">\n',
        '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n",
    ),
    "muse_spark": (
        '\n<atem:invoke name="NAME">\n',
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        "</atem:invoke>\n",
    ),
}
TAGS["deepseek_v4"] = TAGS["deepseek_v32"]


def _write(family: str, name: str, arguments: dict[str, Any]) -> str:
    if family in CALLS:
        return CALLS[family].replace("NAME", name).replace("JSON", _json(arguments))
    if family == "gemma4":
        return f"call:{name}{_gemma(arguments)}"
    if family == "pythonic":
        keywords = ", ".join(f"{key}={_json(value)}" for key, value in arguments.items())
        return f"[{name}({keywords})]"
    head, key, tail = TAGS[family]
    values = (
        key.replace("KEY", parameter)
        .replace("TEXT", "true" if isinstance(value, str) else "false")
        .replace("VALUE", value if isinstance(value, str) else _json(value))
        for parameter, value in arguments.items()
    )
    return head.replace("NAME", name) + "".join(values) + tail


# The text of one call between the markers of the family.
WRITERS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    family: partial(_write, family) for family in (*CALLS, *TAGS, "gemma4", "pythonic")
}
TAGGED = [*TAGS]


def form_of(family: str, thought: tuple[str, str] = ("<think>", "</think>")) -> AnswerFormat:
    """The format of a family for a vocabulary in which no marker is a single token."""
    answer_family = KNOWN[family]
    header = answer_family.header if family == "harmony" else None
    return AnswerFormat(answer_family, ("", "") if header else thought, header=header)


def written(family: str, name: str, arguments: dict[str, Any]) -> str:
    """A call with the family's markers."""
    answer_family = KNOWN[family]
    return answer_family.start + WRITERS[family](name, arguments) + answer_family.end


def read(
    form: AnswerFormat,
    schemas: dict[str, Any],
    text: str,
    width: int = 1000,
    truncated: bool = False,
    **more: Any,
) -> list[Any]:
    """Parse a text, fed in pieces of `width`: its merged parts; calls as (name, arguments)."""
    parser = AnswerParser(form, schemas, **more)
    parts = []
    for start in range(0, len(text), width):
        parts += parser.feed(text[start : start + width])
    parts = merge_texts([*parts, *parser.finish(truncated)])
    return [
        (part.name, strict(part.arguments)) if isinstance(part, ToolCall) else part
        for part in parts
    ]


def strict(text: str) -> Any:
    """Parse JSON as clients do, which refuse NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)
