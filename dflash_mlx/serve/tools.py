"""How a model writes that it calls a tool, and what it wrote.

The syntax of a family is mlx-lm's: where a call starts and ends, and a parser of what is between.
A model whose chat template knows no tools is told of them in words, in the commonest syntax.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers import json_tools

from ..errors import DFlashError
from ..validation import ErrorWrapper
from .ask import Tool


class NotACallError(DFlashError):
    """What a model wrote between the markers of a call is none."""


@dataclass(frozen=True)
class Call:
    """A call of a tool: its id, the tool's name, its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Syntax:
    """How a family calls tools.

    Attributes:
        name: of mlx-lm's parser.
        start, end: around a call, or around several; an empty end is the end of the text.
        parse: (text between, tools) -> a call or several, as dictionaries.
        native: whether the chat template knows tools; else `described` tells the model of them.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Any], Any]
    native: bool

    @classmethod
    def of(cls, tokenizer: Any) -> Syntax:
        """That of a tokenizer of mlx-lm."""
        native = bool(tokenizer.has_tool_calling)
        module = json_tools if not native else None
        parse = module.parse_tool_call if module else tokenizer.tool_parser
        return cls(
            parse.__module__.rpartition(".")[2],
            module.tool_call_start if module else tokenizer.tool_call_start,
            module.tool_call_end if module else tokenizer.tool_call_end,
            parse,
            native,
        )

    def read(self, body: str, tools: Sequence[Tool]) -> list[Call]:
        """The calls in what stands between the markers. Raises `NotACallError`."""
        with ErrorWrapper(NotACallError, "not a call"):
            found = self.parse(body, [tool.for_template() for tool in tools])
        calls = found if isinstance(found, list) else [found]
        if not calls:
            raise NotACallError("no call")
        return [checked_call(one, tools) for one in calls]


def checked_call(found: Any, tools: Sequence[Tool]) -> Call:
    """A call that a parser has found. Raises `NotACallError`."""
    name = found.get("name") if isinstance(found, Mapping) else None
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        raise NotACallError("no call of a tool that there is")
    arguments = found.get("arguments", {})
    with ErrorWrapper(NotACallError, "not a call"):
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise NotACallError("no arguments by name")
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()  # half a pair of surrogates is no text
    return Call(call_id(), name, text)


def call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def described(tools: Sequence[Tool], syntax: Syntax) -> str:
    """What a model is told whose template knows no tools."""
    lines = [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    example = '{"name": "...", "arguments": {...}}'
    return (
        "You can call these tools:\n"
        + "\n".join(lines)
        + f"\nTo call one, write\n{syntax.start}\n{example}\n{syntax.end}"
    )


def in_words(messages: Sequence[Mapping[str, Any]], syntax: Syntax) -> list[dict[str, Any]]:
    """Messages without calls and results, which a template that knows no tools would drop."""
    spoken = []
    for message in messages:
        said = dict(message)
        calls = said.pop("tool_calls", ())
        parts = [said["content"]] if said["content"] else []
        for call in calls:
            text = json.dumps(call["function"], ensure_ascii=False)
            parts.append(f"{syntax.start}\n{text}\n{syntax.end}")
        if said["role"] == "tool":
            said = {"role": "user"}
            parts = [f"<tool_response>\n{message['content']}\n</tool_response>"]
        spoken.append(said | {"content": "\n".join(parts)})
    return spoken
