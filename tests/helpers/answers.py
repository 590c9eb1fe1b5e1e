"""What each family writes to call tools, for tests of what is read."""

import json
from collections.abc import Callable
from typing import Any

from dflash_mlx.answers.families import FAMILIES, AnswerFormat
from dflash_mlx.answers.parser import AnswerParser, ToolCall, merge_texts

KNOWN = {family.name: family for family in FAMILIES}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return _json(value)


def _tags(head: str, key: str, tail: str) -> Callable[[str, dict[str, Any]], str]:
    def write(name: str, arguments: dict[str, Any]) -> str:
        values = (
            key.replace("KEY", one)
            .replace("TEXT", "true" if isinstance(value, str) else "false")
            .replace("VALUE", _text(value))
            for one, value in arguments.items()
        )
        return head.replace("NAME", name) + "".join(values) + tail

    return write


def _object(key: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: f'{{"name": "{name}", "{key}": {_json(arguments)}}}'


# The text of one call between the markers of the family.
WRITERS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "json_tools": lambda name, arguments: f"\n{_object('arguments')(name, arguments)}\n",
    "llama3": _object("parameters"),
    "nemotron": lambda name, arguments: f"[{_object('arguments')(name, arguments)}]",
    "mistral": lambda name, arguments: f"{name}[ARGS]{_json(arguments)}",
    "kimi_k2": lambda name, arguments: (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
    ),
    "deepseek_v3": lambda name, arguments: (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
    ),
    "deepseek_v31": lambda name, arguments: (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
    ),
    "deepseek_v32": _tags(
        '\n<｜DSML｜invoke name="NAME">\n',
        '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n",
    ),
    "qwen3_coder": _tags(
        "\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n"
    ),
    "glm47": _tags("NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", ""),
    "minimax_m2": _tags(
        '\n<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n', "</invoke>\n"
    ),
    "muse_spark": _tags(
        '\n<atem:invoke name="NAME">\n',
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        "</atem:invoke>\n",
    ),
    "gemma4": lambda name, arguments: f"call:{name}{_gemma(arguments)}",
    "pythonic": lambda name, arguments: (
        "[" + name + "(" + ", ".join(f"{key}={_json(one)}" for key, one in arguments.items()) + ")]"
    ),
    "harmony": lambda name, arguments: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        "<|call|>"
    ),
}
WRITERS["deepseek_v4"] = WRITERS["deepseek_v32"]
TAGGED = ["qwen3_coder", "glm47", "minimax_m2", "muse_spark", "deepseek_v32", "deepseek_v4"]
JSON = ["json_tools", "llama3", "nemotron", "mistral", "kimi_k2", "deepseek_v3", "deepseek_v31"]


def form_of(family: str, thought: tuple[str, str] = ("<think>", "</think>")) -> AnswerFormat:
    """The format of a family whose vocabulary has no marker as a token of its own."""
    known = KNOWN[family]
    header = known.header if family == "harmony" else None
    return AnswerFormat(known, ("", "") if header else thought, header=header)


def written(family: str, name: str, arguments: dict[str, Any]) -> str:
    """A whole call."""
    known = KNOWN[family]
    return known.start + WRITERS[family](name, arguments) + known.end


def read(
    form: AnswerFormat,
    schemas: dict[str, Any],
    text: str,
    width: int = 1000,
    truncated: bool = False,
    **more: Any,
) -> list[Any]:
    """All parts, neighbours of a kind in one, and calls as (name, arguments)."""
    parser = AnswerParser(form, schemas, **more)
    parts = []
    for at in range(0, len(text), width):
        parts += parser.feed(text[at : at + width])
    parts = merge_texts([*parts, *parser.finish(truncated)])
    return [
        (one.name, strict(one.arguments)) if isinstance(one, ToolCall) else one for one in parts
    ]


def strict(text: str) -> Any:
    """JSON as clients read it."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)
