"""OpenAI's responses: POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from ..answers.parser import Reasoning, Text, ToolCall
from .body import Body, ListOf
from .errors import RequestError, new_id
from .handler import ResponseStream
from .openai_common import (
    MAX_TOP_LOGPROBS,
    ChoiceName,
    Function,
    MaxTokens,
    ModelName,
    ReasoningOptions,
    ResponseFormat,
    SamplingOptions,
)
from .request import GenerationRequest, Tool, ToolChoice, without_none
from .response import ApiResponse, format_logprob
from .responses_input import CALLS, CUSTOM_INPUT, InputItem, messages_of
from .sse import frame
from .steps import StepOutput

INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"


class TextOptions(Body):
    """How the answer is written."""

    format: ResponseFormat | None = None


class ResponsesTool(Function):
    """A function, a namespace of functions, or a tool of OpenAI's, which is left out.

    A custom tool, as Codex's apply_patch, takes text. The model reads it as a function with one
    argument, and `format` (a grammar) as a part of its description. As a choice a tool has only a
    type and a name.
    """

    type: str
    tools: ListOf[ResponsesTool] | None = None
    format: dict[str, Any] | None = None

    def custom_tool(self) -> Tool:
        """The internal tool of a custom one. Raises `RequestError` if it has no name."""
        grammar = (self.format or {}).get("definition")
        described = [self.description or "", f"The input follows this grammar:\n{grammar}"]
        text = Function(
            name=self.name,
            description="\n\n".join(described[: 1 + bool(grammar)]),
            parameters={
                "type": "object",
                "properties": {CUSTOM_INPUT: {"type": "string"}},
                "required": [CUSTOM_INPUT],
            },
        )
        return text.tool()


class ResponsesAllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: ListOf[ResponsesTool]


class ResponsesBody(SamplingOptions):
    """POST /v1/responses and /v1/responses/input_tokens"""

    model: ModelName = "default"
    input: str | ListOf[InputItem]
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: ListOf[str] | None = None
    tools: ListOf[ResponsesTool] | None = None
    tool_choice: ChoiceName | ResponsesAllowedChoice | ResponsesTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    background: Literal[False] | None = None
    conversation: None = None
    max_tool_calls: None = None
    moderation: None = None
    personality: None = None
    prompt: None = None
    # Fields of chat completions that would change the answer.
    max_tokens: None = None
    response_format: None = None

    @property
    def items(self) -> list[InputItem]:
        """The input."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    def generation_request(self, items: Sequence[InputItem]) -> GenerationRequest:
        """The internal request of a conversation's items. Raises `RequestError`."""
        choice, allowed = self._tool_choice()
        form = self.text.format if self.text else None
        return GenerationRequest(
            self.model,
            self._messages(items),
            self.settings(self.max_output_tokens),
            [tool for _, _, tool in self.functions],
            choice,
            allowed,
            parallel_calls=self.parallel_tool_calls is not False
            and not isinstance(self.tool_choice, ResponsesTool),
            schema=form.answer_schema() if form else None,
            top_logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            template_settings=self.reasoning.template_settings() if self.reasoning else {},
            prompt_field="input",
            ignored=[
                f"tool {tool.type[:40]}"
                for tool in self.tools or ()
                if tool.type not in ("function", "custom", "namespace")
            ],
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return bool(self.top_logprobs) or INCLUDE_LOGPROBS in (self.include or ())

    @cached_property
    def functions(self) -> list[tuple[str | None, str, Tool]]:
        """The functions as (namespace, name in it, tool). Raises `RequestError`."""
        found: list[tuple[str | None, str, Tool]] = []
        for tool in self.tools or ():
            if tool.type == "function":
                found.append((None, tool.name, tool.tool()))
            elif tool.type == "custom":
                found.append((None, tool.name, tool.custom_tool()))
            elif tool.type == "namespace":
                functions = (one for one in tool.tools or () if one.type == "function")
                found += ((tool.name, one.name, one.tool(tool.name)) for one in functions)
        return found

    def _tool_choice(self) -> tuple[ToolChoice, frozenset[str] | None]:
        choice = self.tool_choice
        if isinstance(choice, ResponsesTool):
            return "required", frozenset({choice.name})
        if isinstance(choice, ResponsesAllowedChoice):
            return choice.mode, frozenset(tool.name for tool in choice.tools)
        return "required" if choice == "any" else choice or "auto", None

    def _messages(self, items: Sequence[InputItem]) -> list[dict[str, Any]]:
        messages = list(messages_of(items))
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise RequestError("The input is empty.", param="input")
        return messages


Events = Iterator[dict[str, Any]]


class ResponsesResponse(ApiResponse):
    """One response, put together from its steps. A stream sends its events on the way.

    Args:
        body: the request.
        streams: the answer.
        store: keeps a finished response.
    """

    def __init__(
        self,
        body: ResponsesBody,
        streams: Sequence[ResponseStream],
        store: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(streams)
        self._body, self._store, self._id = body, store, new_id("resp_")
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item may grow
        self._logprobs: list[dict[str, Any]] = []  # for the next text
        self._number = -1  # of the stream's last event
        self._names = {tool.name: (space, name) for space, name, tool in body.functions}
        self._custom = {tool.name for tool in body.tools or () if tool.type == "custom"}

    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""
        async for step in self.steps():
            for _ in self._add_step(step):
                pass
        return self._finished()

    async def _frames(self) -> AsyncIterator[bytes]:
        yield self._frame("response.created", response=self._response()) + self.ping()
        async for step in self.steps():
            yield b"".join(self._frame(**event) for event in self._add_step(step))
        response = self._finished()
        yield self._frame(f"response.{response['status']}", response=response)

    def _error_frame(self, error: RequestError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        details = {"code": code, "message": str(error)}
        response = self._response() | {"status": "failed", "error": details}
        return self._frame("response.failed", response=response)

    def _finished(self) -> dict[str, Any]:
        """The finished response, which later requests may refer to."""
        response = self._response()
        if response["store"]:
            self._store(response)
        return response

    def ping(self) -> bytes:
        """The event that the response goes on."""
        return self._frame("response.in_progress", response=self._response())

    def _frame(self, type: str, **fields: Any) -> bytes:
        self._number += 1
        return frame({"type": type, **fields, "sequence_number": self._number}, type)

    def _add_step(self, step: StepOutput) -> Events:
        self._logprobs += [format_logprob(token) for token in step.logprobs or ()]
        for part in step.parts:
            if isinstance(part, ToolCall):
                yield from self._add_call(part)
            else:
                yield from self._add_text(part)
        if step.finish is not None:
            yield from self._close_item()

    def _add_text(self, part: Text | Reasoning) -> Events:
        kind = "message" if isinstance(part, Text) else "reasoning"
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._close_item()
            yield from self._open_item(kind)
        (content,) = self._output[-1]["content"]
        content["text"] += part.text
        event = {**self._place(), "content_index": 0, "delta": part.text}
        if kind == "reasoning":
            yield {"type": "response.reasoning_text.delta", **event}
            return
        logprobs, self._logprobs = self._logprobs, []
        content["logprobs"] += logprobs
        yield {"type": "response.output_text.delta", **event, "logprobs": logprobs}

    def _add_call(self, call: ToolCall) -> Events:
        yield from self._close_item()
        namespace, name = self._names.get(call.name, (None, call.name))
        is_custom = namespace is None and name in self._custom
        kind, field = CALLS[1] if is_custom else CALLS[0], "input" if is_custom else "arguments"
        text = call.arguments
        if is_custom:
            text = json.loads(text).get(CUSTOM_INPUT, text)
        item = {
            "type": kind,
            "id": new_id("ctc_" if is_custom else "fc_"),
            "call_id": call.id,
            "name": name,
            field: "",
            "status": "in_progress",
            **without_none(namespace=namespace),
        }
        self._output.append(item)
        yield self._item_event("added")
        event, place = f"response.{kind}_{field}", self._place()
        yield {"type": f"{event}.delta", **place, "delta": text}
        yield {"type": f"{event}.done", **place, field: text, "name": name}
        item |= {field: text, "status": "completed"}
        yield self._item_event("done")

    def _open_item(self, kind: str) -> Events:
        self._is_open = True
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": new_id("msg_"), "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            part["logprobs"] = []
        else:
            item |= {"id": new_id("rs_"), "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._output.append(item)
        yield self._item_event("added")
        item["content"] = [part]
        event = {**self._place(), "content_index": 0, "part": dict(part)}
        yield {"type": "response.content_part.added", **event}

    def _close_item(self) -> Events:
        """End an item of text or reasoning."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[-1]
        item["status"] = "incomplete" if self._truncated else "completed"
        (part,) = item["content"]
        event = {**self._place(), "content_index": 0}
        done = {key: part[key] for key in ("text", "logprobs") if key in part}
        yield {"type": f"response.{part['type']}.done", **event, **done}
        yield {"type": "response.content_part.done", **event, "part": dict(part)}
        yield self._item_event("done")

    @property
    def _truncated(self) -> bool:
        return bool(self.finishes) and self.finishes[0].reason == "length"

    def _item_event(self, kind: str) -> dict[str, Any]:
        index = len(self._output) - 1
        item = dict(self._output[-1])
        return {"type": f"response.output_item.{kind}", "output_index": index, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _response(self) -> dict[str, Any]:
        """The response object so far."""
        body, finished = self._body, bool(self.finishes)
        ended = "incomplete" if self._truncated else "completed"
        fields = body.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": ended if finished else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._truncated else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **fields.get("reasoning", {})},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": fields.get("text", {}).get("format", {"type": "text"})},
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if finished else None,
            **({"x_dflash": self.drafting()} if finished else {}),
        }

    def _usage(self) -> dict[str, Any]:
        total = self.usage()
        return {
            "input_tokens": total["prompt_tokens"],
            "input_tokens_details": total["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": total["completion_tokens"],
            "output_tokens_details": total["completion_tokens_details"],
            "total_tokens": total["total_tokens"],
        }
