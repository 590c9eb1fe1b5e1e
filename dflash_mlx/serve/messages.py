"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from ..answers.parser import Part, Reasoning, ToolCall
from ..prompt import EFFORT
from .body import Body, ListOf
from .content import (
    ContentPart,
    ListOfParts,
    Record,
    left_out_of,
    lines,
    read_content,
    read_message,
)
from .errors import RequestError, new_id
from .fields import (
    ModelName,
    ResponseFormat,
    Stops,
    ThinkingConfig,
    sampled,
    sampling_settings,
    template_call,
)
from .request import GenerationRequest, Tool, ToolChoice, has_beginning
from .response import Event, ItemsResponse, grow
from .steps import ResponseStream, StepOutput

# The first system block of Claude Code. It differs between sessions, and a prompt that differs at
# its start shares nothing in the prefix cache.
BILLING_HEADER: Final = "x-anthropic-billing-header:"
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES: Final[dict[str, ToolChoice]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class ContentBlock(ContentPart):
    """A block of a message: text, a document, a call, a result or reasoning."""

    known = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | ListOfParts[Block] | None = None
    is_error: bool | None = None

    @property
    def own_text(self) -> str | None:
        """The text that the block holds; None if it holds none."""
        if self.type == "search_result":
            source = self.source if isinstance(self.source, str) else None
            return lines(self.title, source, read_content(self.content, "\n"))
        return super().own_text

    @property
    def left_out(self) -> list[str]:
        """Words for what the block has and no model here can read."""
        if self.type == "redacted_thinking":
            return [self.type]
        return [*super().left_out, *left_out_of(self.content)]

    def template_result(self) -> dict[str, Any]:
        """A `tool_result` block as chat templates take it."""
        message = read_message("tool", self.content, "\n")
        message.pop("media", None)  # it stays a line
        if self.is_error:
            message["content"] = f"Error: {message['content']}"
        return message | {"tool_call_id": self.tool_use_id or ""}


def _class_of(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    is_record = isinstance(kind, str) and kind not in (*ContentBlock.known, *_DOCUMENTS)
    return "Record" if is_record else "ContentBlock"


_DOCUMENTS: Final = ("document", "search_result", "resource")
_TURN: Final = ("tool_use", "tool_result", "thinking")  # they have fields of a message of their own
Block = Annotated[
    Annotated[ContentBlock, Tag("ContentBlock")] | Annotated[Record, Tag("Record")],
    Discriminator(_class_of),
]


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOfParts[Block] | None = None

    def for_template(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: tool results are messages of their own."""
        if self.content is None or isinstance(self.content, str):
            return [{"role": self.role, "content": self.content or ""}]
        blocks = [block for block in self.content if isinstance(block, ContentBlock)]
        calls = [block for block in blocks if block.type == "tool_use"]
        thoughts = [one.thinking for one in blocks if one.type == "thinking" and one.thinking]
        results = [block.template_result() for block in blocks if block.type == "tool_result"]
        parts = [block for block in self.content if block.type not in _TURN]
        message = read_message(self.role, parts, "\n")
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = [
                template_call(call.id, call.name or "", call.input) for call in calls
            ]
        empty = not (message["content"] or thoughts or calls)
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


class OutputConfig(Body):
    """The reasoning effort and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: ResponseFormat | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    unsupported = {**dict.fromkeys(("compaction", "container", "thread")), "mcp_servers": []}

    model: ModelName = "default"
    messages: Annotated[ListOf[AnthropicMessage], Field(min_length=1)]
    system: str | ListOfParts[Block] | None = None
    tools: ListOf[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None

    def generation_request(self, **settings: Any) -> GenerationRequest:
        """The internal request. Raises `RequestError`."""
        choice = self.tool_choice or AnthropicToolChoice()
        output = self.output_config or OutputConfig()
        if choice.type == "tool" and not choice.name:
            raise RequestError("The tool has no name.", param="tool_choice")
        allowed = frozenset({choice.name or ""}) if choice.type == "tool" else None
        thinking = self.thinking.template_settings() if self.thinking else {}
        effort = {} if output.effort is None else {EFFORT: output.effort}
        form = self.output_format or output.format
        messages = sum((one.for_template() for one in self.messages), self._system_messages())
        return GenerationRequest(
            self.model,
            messages,
            settings,
            [tool.tool() for tool in self.tools or ()],
            _TOOL_CHOICES[choice.type],
            allowed,
            parallel_calls=not choice.disable_parallel_tool_use,
            schema=form.answer_schema() if form else None,
            template_settings=effort | thinking,
            ignored=self.thinking.ignored if self.thinking else (),
            continues_message=has_beginning(messages),
        )

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
    temperature: float | None = sampled("temperature", most=1)
    top_p: float | None = sampled("top_p")
    top_k: int | None = sampled("top_k")
    stop_sequences: Stops | None = None

    def generation_request(self, **more: Any) -> GenerationRequest:
        """The internal request with its sampling. Raises `RequestError`."""
        found = sampling_settings(self, self.stop_sequences, max_tokens=self.max_tokens, **more)
        return super().generation_request(**found)


class MessagesResponse(ItemsResponse):
    """The response to one request.

    Args:
        stream: the answer.
        request_id: of the request.
    """

    def __init__(self, stream: ResponseStream, request_id: str) -> None:
        super().__init__(stream)
        self._request_id, self._is_begun = request_id, False
        self._index = -1  # of the last block

    def _step(self, step: StepOutput) -> Iterator[Event]:
        if not self._is_begun:  # not earlier: only now the usage has the cached tokens
            self._is_begun = True
            message: Event = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
            message |= {"model": self.model, "content": [], "stop_reason": None}
            message |= {"stop_sequence": None, "usage": self._usage(step)}
            yield {"type": "message_start", "message": message}
        yield from super()._step(step)
        if step.reason is not None:
            stopped = step.stop_string is not None
            reason = "stop_sequence" if stopped else _STOP_REASONS[step.reason]
            delta = {"stop_reason": reason, "stop_sequence": step.stop_string}
            more = {"usage": self._usage(step), "x_dflash": self.drafting()}
            yield {"type": "message_delta", "delta": delta} | more
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
        """Anthropic's own."""
        return {"type": "ping"}

    def _add(self, event: Event) -> None:
        if event["type"] == "message_start":
            self.result = event["message"]
        elif event["type"] == "content_block_start":
            self.result["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = self.result["content"][-1], event["delta"]
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
