"""The dialect of OpenAI's responses: what is asked. responses_answers.py has what is answered.

Without a memory: a conversation comes whole with every request, as Codex sends it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from .ask import Ask, Tool, given
from .chat import Effort, effort_settings, history_call
from .errors import Refusal
from .fields import Body, Ignored, Only, Refused, Several

LOGPROBS: Final = "message.output_text.logprobs"

log = logging.getLogger("dflash_mlx.serve")


class Content(Body):
    """A piece of a message or of what a tool said."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def said(self) -> str:
        """Its text. Raises `Refusal` for an image, a sound or a file."""
        if self.type not in ("input_text", "output_text", "text", "refusal"):
            raise Refusal(f"Content of type {self.type!r} is not supported: text is.")
        return (self.refusal if self.type == "refusal" else self.text) or ""


class Thought(Body):
    """A piece of the model's reasoning."""

    text: str = ""


class Item(Body):
    """A message, a call, its result, or reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Several[Content] | None = None
    summary: Several[Thought] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: str | Several[Content] | None = None
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None
    encrypted_content: Ignored = None


class Format(Body):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Ignored = None
    description: Ignored = None


class TextGiven(Body):
    """How an answer is written."""

    format: Format | None = None
    verbosity: Annotated[str | None, Only("medium")] = None


class ReasoningGiven(Body):
    """How much the model thinks."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class ToolGiven(Body):
    """A function, a namespace of functions, or a tool of OpenAI's, which is left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Several[ToolGiven] | None = None


class ToolNamed(Body):
    """A function to be called."""

    type: Literal["function"]
    name: str


class ToolsAllowed(Body):
    """Some of the tools, and whether one has to be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Several[ToolNamed]


class ResponsesBody(Body):
    """POST /v1/responses"""

    model: Annotated[str, Field(max_length=512)] = "default"
    input: str | Several[Item]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    draft: bool | None = None
    include: Several[str] | None = None
    tools: Several[ToolGiven] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolNamed | ToolsAllowed | None = None
    parallel_tool_calls: bool | None = None
    text: TextGiven | None = None
    reasoning: ReasoningGiven | None = None
    background: Annotated[bool | None, Only(False)] = None
    conversation: Refused = None
    max_tool_calls: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None
    truncation: Annotated[str | None, Only("disabled")] = None
    client_metadata: Ignored = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    stream_options: Ignored = None
    user: Ignored = None

    def ask(self) -> Ask:
        """The internal request. Raises `Refusal`."""
        choice: Literal["none", "auto", "required"] = "auto"
        allowed = None
        if isinstance(self.tool_choice, ToolNamed):
            choice, allowed = "required", frozenset({self.tool_choice.name})
        elif isinstance(self.tool_choice, ToolsAllowed):
            choice = self.tool_choice.mode
            allowed = frozenset(one.name for one in self.tool_choice.tools)
        elif self.tool_choice is not None:
            choice = self.tool_choice
        for tool in self.tools or ():
            if tool.type not in ("function", "namespace"):
                log.warning("a tool of type %s is left out", ascii(tool.type[:40]))
        return Ask(
            self.model,
            self._messages(),
            given(
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                block_size=1 if self.draft is False else None,
            ),
            [tool for _, _, tool in self.functions()],
            choice,
            allowed,
            self.parallel_tool_calls is not False and not isinstance(self.tool_choice, ToolNamed),
            self._schema(),
            top_logprobs=(self.top_logprobs or 0) if self.tells_logprobs else None,
            template=effort_settings(self.reasoning.effort if self.reasoning else None),
            origin="input",
        )

    @property
    def tells_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def functions(self) -> list[tuple[str | None, str, Tool]]:
        """Namespace, name there, and internal form of each function. Raises `Refusal`."""
        found: list[tuple[str | None, str, Tool]] = []
        for tool in self.tools or ():
            if tool.type == "function":
                found.append(_function(None, tool))
            elif tool.type == "namespace":
                inside = (one for one in tool.tools or () if one.type == "function")
                found += (_function(tool.name, one) for one in inside)
        return found

    def _messages(self) -> list[dict[str, Any]]:
        items = (
            [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        )
        messages = list(_turns(items))
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise Refusal("There is nothing to answer.", param="input")
        return messages

    def _schema(self) -> Mapping[str, Any] | None:
        kind = self.text.format if self.text else None
        if kind is None or kind.type == "text":
            return None
        return {"type": "object"} if kind.type == "json_object" else kind.schema_ or {}


def flat_name(namespace: str | None, name: str) -> str:
    """What the model calls a function of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def _function(namespace: str | None, tool: ToolGiven) -> tuple[str | None, str, Tool]:
    if not tool.name:
        raise Refusal("A function has no name.", param="tools")
    parameters = tool.parameters or {"type": "object", "properties": {}}
    name = flat_name(namespace, tool.name)
    function = Tool(name, tool.description or "", parameters, bool(tool.strict))
    return namespace, tool.name, function


def _turns(items: Sequence[Item]) -> Iterable[dict[str, Any]]:
    """Messages as chat templates expect them: reasoning, text and calls are one turn."""
    turn: dict[str, Any] = {}
    for item in items:
        kind = "assistant" if item.role == "assistant" else item.type
        if kind in ("assistant", "reasoning", "function_call"):
            if kind != "function_call" and ("tool_calls" in turn or turn.get("content")):
                yield turn
                turn = {}
            turn = turn or {"role": "assistant", "content": ""}
            _add(turn, item, kind)
            continue
        if turn:
            yield turn
            turn = {}
        if kind == "message":
            role = "system" if item.role == "developer" else item.role or "user"
            yield {"role": role, "content": _text(item.content)}
        elif kind == "function_call_output":
            yield {
                "role": "tool",
                "content": _text(item.output),
                "tool_call_id": item.call_id or "",
            }
        else:
            raise Refusal(f"An item of type {item.type[:40]!r} is not supported.", param="input")
    if turn:
        yield turn


def _add(turn: dict[str, Any], item: Item, kind: str) -> None:
    if kind == "assistant":
        turn["content"] = _text(item.content)
    elif kind == "reasoning":
        parts = item.content if isinstance(item.content, list) else ()
        thought = "\n".join(one.text or "" for one in (*parts, *(item.summary or ())))
        if thought:
            turn["reasoning_content"] = thought
    else:
        name = flat_name(item.namespace, item.name or "")
        call = history_call(item.call_id or "", name, item.arguments or "")
        turn.setdefault("tool_calls", []).append(call)


def _text(content: str | list[Content] | None) -> str:
    if isinstance(content, list):
        return "\n".join(one.said() for one in content)
    return content or ""
