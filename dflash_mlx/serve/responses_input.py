"""The input of OpenAI's responses: items, and the messages that they become."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from .body import Body, ListOf
from .errors import RequestError
from .fields import ContentPart, flat_name, read_content, read_message, template_call
from .request import instead_of

CALLS: Final = ("function_call", "custom_tool_call")
# Of tools that run on OpenAI's servers, and what Codex keeps: agents send them back.
_HOSTED: Final = re.compile(r"mcp_\w+|\w+_(call|output)|\w*compaction\w*|ghost_snapshot")
CUSTOM_INPUT: Final = "input"  # the argument of a custom tool, as the model reads it


class InputItem(Body):
    """A message, a call, its result, or reasoning."""

    id: str | None = None
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | ListOf[ContentPart] | None = None
    summary: ListOf[ContentPart] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    input: str | None = None
    output: str | ListOf[ContentPart] | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the item stands for a stored one; then it may have its id alone."""
        return self.type == "item_reference" or self.model_fields_set == {"id"}


def messages_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The messages as chat templates take them: reasoning, text and calls in a row become one.

    Raises `RequestError` for an item of an unknown type.
    """
    found: list[dict[str, Any]] = []
    grows = False  # whether the last message may have more parts
    for item in items:
        kind = "assistant" if item.role == "assistant" else item.type
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
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = read_content(item.output, "\n")
            found.append({"role": "tool", "content": content, "tool_call_id": item.call_id or ""})
        elif not _HOSTED.fullmatch(kind):
            raise RequestError(f"input: items of type {kind[:40]!r} are unknown", param="input")
        else:
            found.append({"role": "assistant", "content": instead_of(kind[:40])})
    return found


def _add_to_turn(turn: dict[str, Any], item: InputItem, kind: str) -> None:
    if kind == "assistant":
        turn["content"] = read_content(item.content, "\n")
    elif kind == "reasoning":
        parts = item.content if isinstance(item.content, list) else ()
        if text := "\n".join(part.text or "" for part in (*parts, *(item.summary or ()))):
            turn["reasoning_content"] = text
    else:
        name, arguments = flat_name(item.namespace, item.name or ""), item.arguments or ""
        if kind == "custom_tool_call":
            arguments = json.dumps({CUSTOM_INPUT: item.input or ""}, ensure_ascii=False)
        call = template_call(item.call_id or "", name, arguments)
        turn.setdefault("tool_calls", []).append(call)
