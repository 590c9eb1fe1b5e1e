"""The input of OpenAI's responses: items, and the messages that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Tag

from .body import Body, ListOf
from .content import ContentPart, ListOfParts, Record, read_message
from .errors import RequestError
from .fields import flat_name, template_call

CALLS: Final = ("function_call", "custom_tool_call")
RESULTS: Final = tuple(f"{kind}_output" for kind in CALLS)
_READ: Final = ("message", "reasoning", "item_reference", *CALLS, *RESULTS)
# Of tools that run on OpenAI's servers, and what Codex keeps: agents send them back.
_RECORDS: Final = re.compile(
    r"mcp_\w+|\w+_(call|output)|\w*compaction\w*|ghost_snapshot|program|additional_tools"
    r"|configuration_update"
)
CUSTOM_INPUT: Final = "input"  # the argument of a custom tool, as the model reads it


class InputItem(Body):
    """A message, a call, its result, or reasoning."""

    id: str | None = None
    type: str | None = None  # a message
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
        """Whether the item stands for a stored one; then it may have its id alone."""
        is_bare = bool(self.id) and self.type is None and self.model_fields_set <= {"id", "type"}
        return self.type == "item_reference" or is_bare


class RecordItem(Record):
    """Any other item."""

    id: str | None = None
    is_reference: ClassVar[bool] = False


def _class_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    is_record = isinstance(kind, str) and kind not in _READ
    return "RecordItem" if is_record else "InputItem"


Item = Annotated[
    Annotated[InputItem, Tag("InputItem")] | Annotated[RecordItem, Tag("RecordItem")],
    Discriminator(_class_of),
]


def messages_of(items: Sequence[InputItem | RecordItem]) -> list[dict[str, Any]]:
    """The messages as chat templates take them: reasoning, text and calls in a row become one.

    Raises `RequestError` for an item of an unknown type.
    """
    found: list[dict[str, Any]] = []
    grows = False  # whether the last message may have more parts
    for item in items:
        if isinstance(item, RecordItem):
            if not _RECORDS.fullmatch(item.type):
                message = f"input: items of type {item.type[:40]!r} are unknown"
                raise RequestError(message, param="input")
            found.append(read_message("assistant", [item], ""))
            grows = False
            continue
        kind = "assistant" if item.role == "assistant" else item.type or "message"
        if kind in ("assistant", "reasoning", *CALLS):
            if kind not in CALLS and grows:
                grows = not ("tool_calls" in found[-1] or found[-1]["content"])
            found += [] if grows else [{"role": "assistant", "content": ""}]
            _add_to_turn(found[-1], item, kind)
            grows = True
            continue
        grows = False
        if kind == "message":
            role = "system" if item.role == "developer" else item.role or "user"
            found.append(read_message(role, item.content, "\n"))
        elif kind in RESULTS:
            result = read_message("tool", item.output, "\n")
            found.append(result | {"tool_call_id": item.call_id or ""})
    return found


def _add_to_turn(turn: dict[str, Any], item: InputItem, kind: str) -> None:
    if kind == "assistant":
        turn |= read_message("assistant", item.content, "\n")
    elif kind == "reasoning":
        parts = item.content if isinstance(item.content, list) else ()
        if text := "\n".join(part.text or "" for part in (*parts, *(item.summary or ()))):
            turn["reasoning_content"] = text
    else:
        name, arguments = flat_name(item.namespace, item.name or ""), item.arguments
        if kind == "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: item.input or ""}, ensure_ascii=False)
        call = template_call(item.call_id, name, arguments)
        turn.setdefault("tool_calls", []).append(call)
