"""How a model writes tool calls, and how they are parsed.

The syntax of a model family is mlx-lm's: the markers around a call, and a parser of the text
between. A model whose chat template has no tools reads their description in its system message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers import json_tools

from ..errors import DFlashError
from ..validation import ErrorWrapper
from .errors import new_id
from .request import Tool


class NotACallError(DFlashError):
    """Text between the markers of a call that does not parse as one."""


@dataclass(frozen=True)
class ToolCall:
    """A call: its id, the tool's name, and its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolSyntax:
    """How a model family writes calls.

    Attributes:
        name: the name of mlx-lm's parser.
        start, end: the markers around one call or several; an empty end is the end of the text.
        parser: (text between, tools) -> one call or several, as dictionaries.
        native: whether the chat template takes tools; otherwise `describe_tools`.
    """

    name: str
    start: str
    end: str
    parser: Callable[[str, Any], Any]
    native: bool

    @classmethod
    def of(cls, tokenizer: Any) -> ToolSyntax:
        """The syntax of an mlx-lm tokenizer; JSON if it has none."""
        native = bool(tokenizer.has_tool_calling)
        source = tokenizer if native else json_tools
        parser = tokenizer.tool_parser if native else json_tools.parse_tool_call
        name = parser.__module__.rpartition(".")[2]
        return cls(name, source.tool_call_start, source.tool_call_end, parser, native)

    def parse(self, text: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """The calls in the text between the markers. Raises `NotACallError`."""
        with ErrorWrapper(NotACallError, "not a call"):
            found = self.parser(text, [tool.for_template() for tool in tools])
        calls = found if isinstance(found, list) else [found]
        if not calls:
            raise NotACallError("no call")
        return [check_call(one, tools) for one in calls]


def check_call(found: Any, tools: Sequence[Tool]) -> ToolCall:
    """A parsed call, checked. Raises `NotACallError`."""
    name = found.get("name") if isinstance(found, Mapping) else None
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        raise NotACallError("unknown tool")
    arguments = found.get("arguments", {})
    with ErrorWrapper(NotACallError, "not a call"):
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise NotACallError("the arguments are not an object")
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()  # fails for half of a surrogate pair
    return ToolCall(new_id("call_"), name, text)


def describe_tools(tools: Sequence[Tool], syntax: ToolSyntax) -> str:
    """The system message about tools for a template without them."""
    lines = [json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools]
    example = '{"name": "...", "arguments": {...}}'
    call = f"{syntax.start}\n{example}\n{syntax.end}"
    return "\n".join(["You can call these tools:", *lines, "To call one, write", call])


def calls_as_text(
    messages: Sequence[Mapping[str, Any]], syntax: ToolSyntax
) -> list[dict[str, Any]]:
    """Messages with calls and results as text, for a template that would drop them."""
    written = []
    for message in messages:
        copy = dict(message)
        parts = [copy["content"]] if copy["content"] else []
        for call in copy.pop("tool_calls", ()):
            text = json.dumps(call["function"], ensure_ascii=False)
            parts.append(f"{syntax.start}\n{text}\n{syntax.end}")
        if copy["role"] == "tool":
            copy = {"role": "user"}
            parts = [f"<tool_response>\n{message['content']}\n</tool_response>"]
        written.append(copy | {"content": "\n".join(parts)})
    return written
