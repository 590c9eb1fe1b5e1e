"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from ..answers.parts import Part, Reasoning, ToolCall
from ..prompt import EFFORT
from .body import Body, ListOf
from .content import (
    ContentPart,
    ListOfParts,
    Record,
    join_lines,
    left_out_words,
    read_content,
    read_message,
)
from .fields import (
    ModelName,
    ResponseFormat,
    Stops,
    ThinkingConfig,
    sampling_field,
    sampling_settings,
    template_call,
)
from .generation_request import GenerationRequest, Tool, ToolChoice, has_beginning
from .http_errors import RequestError, new_id
from .response import Event, ItemsResponse, grow
from .steps import ResponseStream, StepOutput

# The beginning of Claude Code's first system block, which differs between sessions. A prompt that
# differs at its start shares nothing in the prefix cache.
BILLING_HEADER: Final = "x-anthropic-billing-header:"
# Our finish reasons -> Anthropic's.
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES: Final[dict[str, ToolChoice]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class ContentBlock(ContentPart):
    """A block of a message: text, a document, a call, a result or reasoning."""

    text_types = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | ListOfParts[Block] | None = None
    is_error: bool | None = None

    @property
    def readable_text(self) -> str | None:
        """The text of the block; None if it has no text."""
        if self.type == "search_result":
            source = self.source if isinstance(self.source, str) else None
            return join_lines(self.title, source, read_content(self.content, "\n"))
        return super().readable_text

    @property
    def left_out(self) -> list[str]:
        """Words for content that a text model cannot read."""
        if self.type == "redacted_thinking":
            return [self.type]
        return [*super().left_out, *left_out_words(self.content)]

    def template_result(self) -> dict[str, Any]:
        """Convert a `tool_result` block for a chat template."""
        message = read_message("tool", self.content, "\n")
        message.pop("media", None)  # its line stays in the content
        if self.is_error:
            message["content"] = f"Error: {message['content']}"
        return message | {"tool_call_id": self.tool_use_id or ""}


def _block_class(block: Any) -> str:
    """Return the name of the class that validates a block."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    is_record = isinstance(kind, str) and kind not in (*ContentBlock.text_types, *_DOCUMENTS)
    return "Record" if is_record else "ContentBlock"


_DOCUMENTS: Final = ("document", "search_result", "resource")
# Types of blocks that become fields of a message, or messages of their own.
_STRUCTURE: Final = ("tool_use", "tool_result", "thinking")
Block = Annotated[
    Annotated[ContentBlock, Tag("ContentBlock")] | Annotated[Record, Tag("Record")],
    Discriminator(_block_class),
]


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOfParts[Block] | None = None

    def for_template(self) -> list[dict[str, Any]]:
        """Convert the message for a chat template. Each tool result becomes another message."""
        if self.content is None or isinstance(self.content, str):
            return [{"role": self.role, "content": self.content or ""}]
        thoughts = []
        calls = []
        results = []
        for block in self.content:
            if not isinstance(block, ContentBlock):
                continue
            if block.type == "thinking" and block.thinking:
                thoughts.append(block.thinking)
            elif block.type == "tool_use":
                calls.append(template_call(block.id, block.name or "", block.input))
            elif block.type == "tool_result":
                results.append(block.template_result())
        parts = [block for block in self.content if block.type not in _STRUCTURE]
        message = read_message(self.role, parts, "\n")
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        is_empty = not (message["content"] or thoughts or calls)
        return results if results and is_empty else [*results, message]


class AnthropicTool(Body):
    """A tool of the client. Only Anthropic's models and servers know other types of tools."""

    type: str | None = None
    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """Convert to the internal tool. Raises `RequestError`."""
        if self.type not in (None, "custom"):
            message = (
                f"Tools of type {self.type[:40]!r} are built into Anthropic's models or servers: "
                "send a custom tool with an input_schema."
            )
            raise RequestError(message, param="tools")
        if not self.name or self.input_schema is None:
            raise RequestError("A tool needs a name and an input_schema.", param="tools")
        return Tool(
            self.name,
            description=self.description or "",
            parameters=self.input_schema,
            strict=bool(self.strict),
        )


class AnthropicToolChoice(Body):
    """Whether a tool must be called, and which one."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    """The reasoning effort and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: ResponseFormat | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    unsupported = {"compaction": None, "container": None, "thread": None, "mcp_servers": []}

    model: ModelName = "default"
    messages: Annotated[ListOf[AnthropicMessage], Field(min_length=1)]
    system: str | ListOfParts[Block] | None = None
    tools: ListOf[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None

    def generation_request(self, **settings: Any) -> GenerationRequest:
        """Convert to the internal request. Raises `RequestError`."""
        choice = self.tool_choice or AnthropicToolChoice()
        output = self.output_config or OutputConfig()
        if choice.type == "tool" and not choice.name:
            raise RequestError("The tool has no name.", param="tool_choice")
        template_settings: dict[str, Any] = {}
        if output.effort is not None:
            template_settings[EFFORT] = output.effort
        if self.thinking is not None:
            template_settings |= self.thinking.template_settings()
        response_format = self.output_format or output.format
        messages = self._system_messages()
        for message in self.messages:
            messages += message.for_template()
        return GenerationRequest(
            model=self.model,
            prompt=messages,
            settings=settings,
            tools=[tool.tool() for tool in self.tools or ()],
            tool_choice=_TOOL_CHOICES[choice.type],
            allowed_tools=frozenset({choice.name or ""}) if choice.type == "tool" else None,
            parallel_calls=not choice.disable_parallel_tool_use,
            schema=response_format.answer_schema() if response_format else None,
            template_settings=template_settings,
            ignored=self.thinking.ignored if self.thinking else (),
            continues_message=has_beginning(messages),
        )

    def _system_messages(self) -> list[dict[str, Any]]:
        """Return the system message, without the block that differs between sessions."""
        blocks = [self.system] if isinstance(self.system, str) else self.system or []
        texts = []
        for block in blocks:
            text = block if isinstance(block, str) else block.read()
            if text and not text.startswith(BILLING_HEADER):
                texts.append(text)
        return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


class MessagesBody(CountBody):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: float | None = sampling_field("temperature", maximum=1)
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k")
    stop_sequences: Stops | None = None

    def generation_request(self, **more: Any) -> GenerationRequest:
        """Convert to the internal request, with sampling settings. Raises `RequestError`."""
        settings = sampling_settings(self, self.stop_sequences, max_tokens=self.max_tokens, **more)
        return super().generation_request(**settings)


class MessagesResponse(ItemsResponse):
    """The response to one request.

    Args:
        stream: the answer.
        request_id: the id of the request.
    """

    def __init__(self, stream: ResponseStream, request_id: str) -> None:
        super().__init__(stream)
        self._request_id = request_id
        self._has_begun = False
        self._index = -1  # of the last block

    def _step(self, step: StepOutput) -> Iterator[Event]:
        if not self._has_begun:  # not before the first step, which knows the cached tokens
            self._has_begun = True
            message: Event = {
                "id": new_id("msg_"),
                "type": "message",
                "role": "assistant",
                "model": self.model,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": self._usage(step),
            }
            yield {"type": "message_start", "message": message}
        yield from super()._step(step)
        if step.reason is not None:
            reason = _STOP_REASONS[step.reason]
            if step.stop_string is not None:
                reason = "stop_sequence"
            yield {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": step.stop_string},
                "usage": self._usage(step),
                "x_dflash": self.drafting(),
            }
            yield {"type": "message_stop"}

    def _open(self, part: Part) -> Iterator[Event]:
        self._index += 1
        block: Event = {"type": "text", "text": "", "citations": None}
        if isinstance(part, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(part, ToolCall):
            call_id = part.id.replace("call_", "toolu_")  # the prefix that Anthropic's ids have
            block = {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}
        yield self._event("content_block_start", content_block=block)

    def _grow(self, part: Part) -> Iterator[Event]:
        if isinstance(part, ToolCall):
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
        elif isinstance(part, Reasoning):
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            delta = {"type": "text_delta", "text": part.text}
        yield self._event("content_block_delta", delta=delta)

    def _close(self) -> Iterator[Event]:
        yield self._event("content_block_stop")

    def _error(self, error: RequestError) -> Event:
        return error.anthropic(self._request_id)

    def ping(self) -> Event:
        """Return Anthropic's ping event."""
        return {"type": "ping"}

    def _add(self, event: Event) -> None:
        if event["type"] == "message_start":
            self.result = event["message"]
        elif event["type"] == "content_block_start":
            self.result["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block = self.result["content"][-1]
            delta = event["delta"]
            if "partial_json" in delta:
                block["input"] = from_json(delta["partial_json"])
            else:
                grow(block, {block["type"]: delta[block["type"]]})
        elif event["type"] == "message_delta":
            self.result |= event["delta"]
            self.result |= {"usage": event["usage"], "x_dflash": event["x_dflash"]}

    def _event(self, kind: str, **content: Any) -> Event:
        return {"type": kind, "index": self._index, **content}

    def _usage(self, step: StepOutput) -> dict[str, Any]:
        stats = step.event.stats
        return {
            "input_tokens": self._stream.prompt_tokens - stats.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stats.reused_tokens,
            "output_tokens": stats.output_tokens,
        }
