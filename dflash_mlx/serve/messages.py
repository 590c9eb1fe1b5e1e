"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from pydantic_core import from_json

from ..answers.parser import Part, Reasoning, Text, ToolCall
from .body import Body, ListOf
from .errors import RequestError, new_id
from .handler import ResponseStream
from .openai_common import (
    ModelName,
    Nothing,
    ThinkingConfig,
    template_call,
    thinking_settings,
)
from .request import GenerationRequest, Tool, ToolChoice, instead_of, without_none
from .response import ApiResponse
from .sse import frame
from .steps import Finish, StepOutput

# The first system block of Claude Code. It differs between sessions, and a prompt that differs at
# its start shares nothing in the prefix cache.
BILLING_HEADER: Final = "x-anthropic-billing-header:"
MAX_STOPS: Final = 16
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

    def read(self) -> str:
        """The text, or a line in place of what is not text."""
        return instead_of(self.media) if self.media else self.text or ""

    def template_result(self) -> dict[str, Any]:
        """A `tool_result` block as chat templates take it."""
        text = self.content or ""
        if isinstance(text, list):
            text = "\n".join(block.read() for block in text)
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
                calls.append(template_call(block.id or "", block.name or "", block.input or {}))
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type != "redacted_thinking":
                texts.append(block.read())
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
    thinking: ThinkingConfig | None = None
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
        thinks = (self.thinking or ThinkingConfig()).type != "disabled"
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
        return {}

    def _system_messages(self) -> list[dict[str, Any]]:
        """The system prompt, without the part that differs between sessions."""
        blocks = [self.system] if isinstance(self.system, str) else self.system or []
        texts = [one if isinstance(one, str) else one.read() for one in blocks]
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


class MessagesResponse(ApiResponse):
    """The response to one request.

    Args:
        streams: the answer.
        request_id: of the request.
    """

    def __init__(self, streams: Sequence[ResponseStream], request_id: str) -> None:
        super().__init__(streams)
        self._request_id = request_id
        self._head: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.model,
        }
        self._is_begun, self._index, self._open_kind = False, -1, ""

    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""
        (answer,) = await self.answers()
        assert answer.finish is not None  # `answers` raises otherwise
        return {
            **self._head,
            "content": list(map(_block, answer.parts)),
            **_stop(answer.finish),
            "usage": self._usage(answer),
            "x_dflash": self.drafting(),
        }

    async def _frames(self) -> AsyncIterator[bytes]:
        async for step in self.steps():
            yield b"".join(self._events(step))

    def _events(self, step: StepOutput) -> Iterator[bytes]:
        if not self._is_begun:  # not earlier: only now the usage has the cached tokens
            self._is_begun = True
            stop = {"stop_reason": None, "stop_sequence": None}
            message = {**self._head, "content": [], **stop, "usage": self._usage(step)}
            yield _event("message_start", message=message)
        for part in step.parts:
            block = _block(part)
            kind, content = block["type"], "input" if isinstance(part, ToolCall) else block["type"]
            if kind != self._open_kind or isinstance(part, ToolCall):
                yield from self._close_block()
                self._index, self._open_kind = self._index + 1, kind
                empty = block | {content: type(block[content])()}
                yield _event("content_block_start", index=self._index, content_block=empty)
            delta = {"type": f"{kind}_delta", kind: block[content]}
            if isinstance(part, ToolCall):
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
            yield _event("content_block_delta", index=self._index, delta=delta)
        if step.finish is not None:
            yield from self._close_block()
            total, drafted = self._usage(step), self.drafting()
            delta = _stop(step.finish)
            yield _event("message_delta", delta=delta, usage=total, x_dflash=drafted)
            yield _event("message_stop")

    def _error_frame(self, error: RequestError) -> bytes:
        return frame(error.anthropic(self._request_id), "error")

    def ping(self) -> bytes:
        """Anthropic's own."""
        return _event("ping")

    def _close_block(self) -> Iterator[bytes]:
        if self._open_kind:
            yield _event("content_block_stop", index=self._index)

    def _usage(self, step: StepOutput) -> dict[str, Any]:
        stats = step.event.stats
        return {
            "input_tokens": self.prompt_tokens - stats.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stats.reused_tokens,
            "output_tokens": stats.output_tokens,
        }


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text, "citations": None}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    call_id = part.id.replace("call_", "toolu_")  # the prefix that Anthropic's ids have
    arguments = from_json(part.arguments)
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": arguments}


def _event(kind: str, **content: Any) -> bytes:
    return frame({"type": kind, **content}, kind)


def _stop(finish: Finish) -> dict[str, Any]:
    stopped = finish.stop_string is not None
    reason = "stop_sequence" if stopped else _STOP_REASONS[finish.reason]
    return {"stop_reason": reason, "stop_sequence": finish.stop_string}
