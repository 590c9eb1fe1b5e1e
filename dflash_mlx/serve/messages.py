"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field
from pydantic_core import from_json

from ..answers.parser import Part, Reasoning, Text, ToolCall, merge_texts
from ..events import Stats
from .body import Body, ListOf
from .errors import RequestError, new_id
from .handler import Finish, ResponseStream
from .openai_common import ModelName, Nothing, Thinking, drafting, thinking_settings
from .request import (
    GenerationRequest,
    Tool,
    ToolChoice,
    instead_of,
    without_none,
)
from .sse import Frames, frame

# The first system block of Claude Code. It differs between sessions, and a prompt that differs at
# its start shares nothing in the prefix cache.
BILLING_HEADER: Final = "x-anthropic-billing-header:"
MAX_STOPS: Final = 16
PING: Final = frame({"type": "ping"}, "ping")
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_READ: Final = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_TOOL_CHOICES: Final[dict[str, ToolChoice]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class ContentBlock(Body):
    """A block of a message: text, a call, a result or reasoning."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | ListOf[ContentBlock] | None = None
    is_error: bool | None = None

    @property
    def media(self) -> str | None:
        """The kind of an image, a PDF or another block that is not read; None for others."""
        return None if self.type in _READ else self.type[:40]

    def read_text(self) -> str:
        """The text, or a line in place of what is not text."""
        return instead_of(self.media) if self.media else self.text or ""

    def template_call(self) -> dict[str, Any]:
        """A `tool_use` block as chat templates take it."""
        function = {"name": self.name or "", "arguments": self.input or {}}
        return {"id": self.id or "", "type": "function", "function": function}

    def template_result(self) -> dict[str, Any]:
        """A `tool_result` block as chat templates take it."""
        text = self.content or ""
        if isinstance(text, list):
            text = "\n".join(block.read_text() for block in text)
        if self.is_error:
            text = f"Error: {text}"
        return {"role": "tool", "content": text, "tool_call_id": self.tool_use_id or ""}


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[ContentBlock]

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: tool results are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results, calls, texts, thoughts = [], [], [], []
        for block in self.content:
            if block.type == "tool_result":
                results.append(block.template_result())
            elif block.type == "tool_use":
                calls.append(block.template_call())
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type != "redacted_thinking":
                texts.append(block.read_text())
        message: dict[str, Any] = {"role": self.role, "content": "\n".join(texts)}
        if any(thoughts):
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        empty = len(message) == 2 and not message["content"]
        if media := [block.media for block in self.content if block.media]:
            message["media"] = media[0]
        return results if results and empty else [*results, message]


class AnthropicTool(Body):
    """A tool of the client. Other types are known to Anthropic's models and servers alone."""

    type: str | None = None
    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """The internal tool. Raises `RequestError`."""
        if self.type not in (None, "custom"):
            message = (
                f"Tools of type {self.type[:40]!r} are built into Anthropic's models or servers: "
                "send a custom tool with an input_schema."
            )
            raise RequestError(message, param="tools")
        if not self.name or self.input_schema is None:
            raise RequestError("A tool needs a name and an input_schema.", param="tools")
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


class AnthropicToolChoice(Body):
    """Whether a tool has to be called, and which."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """The format of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The reasoning effort and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    model: ModelName = "default"
    messages: Annotated[ListOf[AnthropicMessage], Field(min_length=1)]
    system: str | ListOf[ContentBlock] | None = None
    tools: ListOf[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    compaction: None = None
    mcp_servers: Nothing = None
    thread: None = None

    def generation_request(self) -> GenerationRequest:
        """The internal request. Raises `RequestError`."""
        choice = self.tool_choice or AnthropicToolChoice()
        output = self.output_config or OutputConfig()
        allowed = None
        if choice.type == "tool":
            if choice.name is None:
                raise RequestError("name is missing.", param="tool_choice.name")
            allowed = frozenset({choice.name})
        thinks = (self.thinking or Thinking()).type != "disabled"
        form = self.output_format or output.format
        messages = self._system_messages()
        for message in self.messages:
            messages += message.for_template()
        last = messages[-1]
        return GenerationRequest(
            self.model,
            messages,
            self._settings(),
            [tool.tool() for tool in self.tools or ()],
            _TOOL_CHOICES[choice.type],
            allowed,
            parallel_calls=not choice.disable_parallel_tool_use,
            schema=form.schema_ if form else None,
            template_settings=thinking_settings(output.effort) | {"enable_thinking": thinks},
            continues_message=last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last,
        )

    def _settings(self) -> dict[str, Any]:
        """The engine's settings that the request names."""
        return {}

    def _system_messages(self) -> list[dict[str, Any]]:
        """The system prompt, without the part that differs between sessions."""
        blocks = [self.system] if isinstance(self.system, str) else self.system or []
        texts = [one if isinstance(one, str) else one.read_text() for one in blocks]
        text = "\n\n".join(one for one in texts if one and not one.startswith(BILLING_HEADER))
        return [{"role": "system", "content": text}] if text else []


class MessagesBody(CountBody):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: Annotated[ListOf[str], Field(max_length=MAX_STOPS)] | None = None
    container: None = None

    def _settings(self) -> dict[str, Any]:
        return without_none(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=[text for text in self.stop_sequences or () if text] or None,
        )


async def complete(stream: ResponseStream) -> dict[str, Any]:
    """The whole response. Raises `RequestError`."""
    steps = [step async for step in stream.steps()]
    parts = merge_texts([part for step in steps for part in step.parts])
    finish = steps[-1].finish
    assert finish is not None  # `steps` raises otherwise
    return {
        **_head(stream),
        "content": [_whole_block(part) for part in parts],
        **_stop(finish),
        "usage": _usage(stream, finish.stats),
        "x_dflash": drafting([finish]),
    }


def _whole_block(part: Part) -> dict[str, Any]:
    block = _new_block(part)
    if isinstance(part, ToolCall):
        return block | {"input": from_json(part.arguments)}
    return block | {block["type"]: part.text}


def _new_block(part: Part) -> dict[str, Any]:
    """An empty content block."""
    if isinstance(part, Text):
        return {"type": "text", "text": "", "citations": None}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    call_id = part.id.replace("call_", "toolu_")  # the prefix that Anthropic's ids have
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}


async def stream_frames(stream: ResponseStream, request_id: str) -> Frames:
    """The response as a stream, one item per decode step; an error is its last frame."""
    stop = {"stop_reason": None, "stop_sequence": None}
    head: dict[str, Any] = {**_head(stream), "content": [], **stop}
    index, open_kind = -1, ""
    try:
        async for step in stream.steps():
            frames = []
            if head:  # not earlier: only now the usage has the cached tokens
                head["usage"] = _usage(stream, step.event.stats)
                frames.append(_event("message_start", message=head))
                head = {}
            for part in step.parts:
                block = _new_block(part)
                if block["type"] != open_kind or isinstance(part, ToolCall):
                    if open_kind:
                        frames.append(_event("content_block_stop", index=index))
                    index, open_kind = index + 1, block["type"]
                    frames.append(_event("content_block_start", index=index, content_block=block))
                frames.append(_event("content_block_delta", index=index, delta=_delta(part)))
            if step.finish is not None:
                if open_kind:
                    frames.append(_event("content_block_stop", index=index))
                total, drafted = _usage(stream, step.finish.stats), drafting([step.finish])
                delta = _stop(step.finish)
                frames.append(_event("message_delta", delta=delta, usage=total, x_dflash=drafted))
                frames.append(_event("message_stop"))
            if frames:
                yield b"".join(frames)
    except RequestError as error:
        yield frame(error.anthropic(request_id), "error")


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Reasoning):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.arguments}


def _event(kind: str, **content: Any) -> bytes:
    return frame({"type": kind, **content}, kind)


def _head(stream: ResponseStream) -> dict[str, Any]:
    model = stream.request.model
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}


def _stop(finish: Finish) -> dict[str, Any]:
    stopped = finish.stop_string is not None
    reason = "stop_sequence" if stopped else _STOP_REASONS[finish.reason]
    return {"stop_reason": reason, "stop_sequence": finish.stop_string}


def _usage(stream: ResponseStream, stats: Stats) -> dict[str, Any]:
    cached = stats.reused_tokens
    return {
        "input_tokens": stream.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": stats.output_tokens,
    }
