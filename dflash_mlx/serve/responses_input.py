"""The input of OpenAI's responses: items, which become messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Tag

from .body import Body, ListOf
from .content import ContentPart, ListOfParts, Record, read_message
from .fields import flat_name, template_call
from .http_errors import RequestError

CALLS: Final = ("function_call", "custom_tool_call")
RESULTS: Final = tuple(f"{kind}_output" for kind in CALLS)
# The types of `InputItem`; others are `RecordItem`.
_INPUT_TYPES: Final = ("message", "reasoning", "item_reference", *CALLS, *RESULTS)
# Types of records of tools that run on OpenAI's servers, and of Codex. Agents send them back.
_RECORDS: Final = re.compile(
    r"mcp_\w+|\w+_(call|output)|\w*compaction\w*|ghost_snapshot|program|additional_tools"
    r"|configuration_update"
)
CUSTOM_INPUT: Final = "input"  # the name of a custom tool's argument


class InputItem(Body):
    """A message, a call, its result, or reasoning."""

    id: str | None = None
    type: str | None = None  # None is a message
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | ListOfParts[ContentPart] | None = None
    summary: ListOf[ContentPart] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    call_id: str | None = None
    input: str | None = None
    output: str | ListOfParts[ContentPart] | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the item stands for a stored one. Such an item may only have an id."""
        is_bare = bool(self.id) and self.type is None and self.model_fields_set <= {"id", "type"}
        return self.type == "item_reference" or is_bare


class RecordItem(Record):
    """Any other item."""

    id: str | None = None
    is_reference: ClassVar[bool] = False


def _item_class(item: Any) -> str:
    """Return the name of the class that validates an item."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    is_record = isinstance(kind, str) and kind not in _INPUT_TYPES
    return "RecordItem" if is_record else "InputItem"


Item = Annotated[
    Annotated[InputItem, Tag("InputItem")] | Annotated[RecordItem, Tag("RecordItem")],
    Discriminator(_item_class),
]


def to_messages(items: Sequence[InputItem | RecordItem]) -> list[dict[str, Any]]:
    """Convert items to messages for a chat template.

    Reasoning, text and calls in a row become one message.

    Raises `RequestError` for an item of an unknown type.
    """
    messages: list[dict[str, Any]] = []
    is_open = False  # whether the next item may belong to the last message
    for item in items:
        if isinstance(item, RecordItem):
            if not _RECORDS.fullmatch(item.type):
                message = f"input: items of type {item.type[:40]!r} are unknown"
                raise RequestError(message, param="input")
            messages.append(read_message("assistant", [item], ""))
            is_open = False
            continue
        kind = "assistant" if item.role == "assistant" else item.type or "message"
        if kind in ("assistant", "reasoning", *CALLS):
            if is_open and kind not in CALLS:
                is_open = not ("tool_calls" in messages[-1] or messages[-1]["content"])
            if not is_open:
                messages.append({"role": "assistant", "content": ""})
            _add_to_message(messages[-1], item, kind)
            is_open = True
            continue
        is_open = False
        if kind == "message":
            role = "system" if item.role == "developer" else item.role or "user"
            messages.append(read_message(role, item.content, "\n"))
        elif kind in RESULTS:
            result = read_message("tool", item.output, "\n")
            messages.append(result | {"tool_call_id": item.call_id or ""})
    return messages


def _add_to_message(message: dict[str, Any], item: InputItem, kind: str) -> None:
    """Add text, reasoning or a call to a message of the assistant."""
    if kind == "assistant":
        message |= read_message("assistant", item.content, "\n")
    elif kind == "reasoning":
        parts = list(item.content) if isinstance(item.content, list) else []
        parts += item.summary or ()
        reasoning = "\n".join(part.text or "" for part in parts)
        if reasoning:
            message["reasoning_content"] = reasoning
    else:
        name = flat_name(item.namespace, item.name or "")
        arguments = item.arguments
        if kind == "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: item.input or ""}, ensure_ascii=False)
        call = template_call(item.call_id, name, arguments)
        message.setdefault("tool_calls", []).append(call)
