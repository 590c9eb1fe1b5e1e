"""OpenAI's responses: POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

from pydantic_core import from_json

from ..answers.parts import Part, Text, ToolCall
from .body import Body, ListOf
from .fields import (
    Function,
    MaxTokens,
    ModelName,
    ReasoningOptions,
    ResponseFormat,
    SamplingOptions,
    ToolChoiceField,
    TopLogprobs,
    read_tool_choice,
)
from .generation_request import GenerationRequest, Tool
from .http_errors import RequestError, new_id
from .response import Event, ItemsResponse
from .responses_input import CALLS, CUSTOM_INPUT, InputItem, Item, RecordItem, to_messages
from .steps import ResponseStream, StepOutput

# The type of a call -> the field that has its text.
_CALL_FIELDS: Final = dict(zip(CALLS, ("arguments", CUSTOM_INPUT), strict=True))
INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"  # in `include`


class TextOptions(Body):
    """Options of the answer's text."""

    format: ResponseFormat | None = None


class ResponsesTool(Function):
    """A function, a namespace of functions, or a tool of OpenAI, which is ignored.

    A custom tool, such as Codex's apply_patch, takes text. The model sees it as a function with one
    argument, and its `format` (a grammar) as part of its description.
    """

    type: str
    tools: ListOf[ResponsesTool] | None = None
    format: dict[str, Any] | None = None

    def custom_tool(self) -> Tool:
        """Convert a custom tool to the internal tool. Raises `RequestError` if it has no name."""
        description = self.description or ""
        grammar = (self.format or {}).get("definition")
        if grammar:
            description += f"\n\nThe input follows this grammar:\n{grammar}"
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
        }
        return Function(name=self.name, description=description, parameters=schema).tool()


class ResponsesBody(SamplingOptions):
    """POST /v1/responses and /v1/responses/input_tokens"""

    unsupported = {
        **SamplingOptions.unsupported,
        **dict.fromkeys(("conversation", "max_tool_calls", "moderation", "personality", "prompt")),
        **dict.fromkeys(("max_tokens", "response_format")),  # fields of chat completions
        "background": False,
    }

    model: ModelName = "default"
    input: str | ListOf[Item]
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: TopLogprobs | None = None
    include: ListOf[str] | None = None
    tools: ListOf[ResponsesTool] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None

    @property
    def items(self) -> list[InputItem | RecordItem]:
        """The items of the input."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    def generation_request(self, items: Sequence[InputItem | RecordItem]) -> GenerationRequest:
        """Convert a conversation's items to the internal request. Raises `RequestError`."""
        response_format = self.text.format if self.text else None
        ignored = []
        for tool in self.tools or ():
            if tool.type not in ("function", "custom", "namespace"):
                ignored.append(f"tool {tool.type[:40]}")
        return GenerationRequest(
            model=self.model,
            prompt=self._messages(items),
            settings=self.settings(self.max_output_tokens),
            tools=[tool for _, _, tool in self.functions],
            **read_tool_choice(self.tool_choice, self.parallel_tool_calls),
            schema=response_format.answer_schema() if response_format else None,
            top_logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            template_settings=self.reasoning.template_settings() if self.reasoning else {},
            prompt_field="input",
            ignored=ignored,
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return bool(self.top_logprobs) or INCLUDE_LOGPROBS in (self.include or ())

    @cached_property
    def functions(self) -> list[tuple[str | None, str, Tool]]:
        """The functions as (namespace, name in the namespace, tool). Raises `RequestError`."""
        functions: list[tuple[str | None, str, Tool]] = []
        for tool in self.tools or ():
            if tool.type == "function":
                functions.append((None, tool.name, tool.tool()))
            elif tool.type == "custom":
                functions.append((None, tool.name, tool.custom_tool()))
            elif tool.type == "namespace":
                for inner in tool.tools or ():
                    if inner.type == "function":
                        functions.append((tool.name, inner.name, inner.tool(tool.name)))
        return functions

    def _messages(self, items: Sequence[InputItem | RecordItem]) -> list[dict[str, Any]]:
        messages = to_messages(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise RequestError("The input is empty.", param="input")
        return messages


class ResponsesResponse(ItemsResponse):
    """The response to one request.

    Args:
        stream: the answer.
        body: the request.
        store: keeps a finished response.
    """

    def __init__(
        self,
        stream: ResponseStream,
        body: ResponsesBody,
        store: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(stream)
        self._body = body
        self._store = store
        self._id = new_id("resp_")
        self._output: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []  # for the next text
        self._number = -1  # of the stream's last event
        # The name that the model knows -> the namespace, and the name in it.
        self._names = {tool.name: (space, name) for space, name, tool in body.functions}
        self._custom = {tool.name for tool in body.tools or () if tool.type == "custom"}

    def _begin(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self._response()}
        yield self.ping()

    def _step(self, step: StepOutput) -> Iterator[Event]:
        self._logprobs += step.logprobs or ()
        return super()._step(step)

    def _end(self) -> Iterator[Event]:
        response = self._response()
        if response["store"]:
            self._store(response)
        yield {"type": f"response.{response['status']}", "response": response}

    def _error(self, error: RequestError) -> Event:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        details = {"code": code, "message": str(error)}
        response = self._response() | {"status": "failed", "error": details}
        return {"type": "response.failed", "response": response}

    def ping(self) -> Event:
        """Return an event that says that the response is in progress."""
        return {"type": "response.in_progress", "response": self._response()}

    def _add(self, event: Event) -> None:
        self.result = event.get("response", self.result)

    def frame(self, event: Event) -> bytes:
        """Encode an event for the stream, with its number."""
        self._number += 1
        return super().frame(event | {"sequence_number": self._number})

    def _open(self, part: Part) -> Iterator[Event]:
        if isinstance(part, ToolCall):
            self._output.append(self._call_item(part))
            yield self._item_event("added")
            return
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"status": "in_progress", "content": []}
        if isinstance(part, Text):
            item |= {"type": "message", "id": self._item_id("msg_"), "role": "assistant"}
            content |= {"type": "output_text", "annotations": [], "logprobs": []}
        else:
            item |= {"type": "reasoning", "id": self._item_id("rs_"), "summary": []}
        self._output.append(item)
        yield self._item_event("added")
        item["content"] = [content]
        yield self._event("content_part.added", content_index=0, part=dict(content))

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        """Return a new item for a call, without its arguments."""
        namespace, name = self._names.get(call.name, (None, call.name))
        function_call, custom_call = CALLS
        is_custom = namespace is None and name in self._custom
        kind = custom_call if is_custom else function_call
        item = {
            "type": kind,
            "id": self._item_id("ctc_" if is_custom else "fc_"),
            "call_id": call.id,
            "name": name,
            _CALL_FIELDS[kind]: "",
            "status": "in_progress",
        }
        if namespace:
            item["namespace"] = namespace
        return item

    def _grow(self, part: Part) -> Iterator[Event]:
        item = self._output[-1]
        if isinstance(part, ToolCall):
            field = _CALL_FIELDS[item["type"]]
            text = part.arguments
            if field == CUSTOM_INPUT:
                text = from_json(text).get(field, text)
            item[field] = text
            yield self._event(f"{item['type']}_{field}.delta", delta=text)
            return
        [content] = item["content"]
        content["text"] += part.text
        event = self._event(f"{content['type']}.delta", content_index=0, delta=part.text)
        if isinstance(part, Text):
            event["logprobs"] = self._logprobs
            content["logprobs"] += self._logprobs
            self._logprobs = []
        yield event

    def _close(self) -> Iterator[Event]:
        item = self._output[-1]
        field = _CALL_FIELDS.get(item["type"])
        if field is not None:
            item["status"] = "completed"
            fields = {field: item[field], "name": item["name"]}
            yield self._event(f"{item['type']}_{field}.done", **fields)
        else:
            item["status"] = "incomplete" if self._is_truncated else "completed"
            [content] = item["content"]
            fields = {key: content[key] for key in ("text", "logprobs") if key in content}
            yield self._event(f"{content['type']}.done", content_index=0, **fields)
            yield self._event("content_part.done", content_index=0, part=dict(content))
        yield self._item_event("done")

    def _item_id(self, prefix: str) -> str:
        """Make the next item's id. `ResponseStore` finds the response's id in it."""
        return f"{prefix}{self._id.removeprefix('resp_')}_{len(self._output)}"

    def _event(self, kind: str, **fields: Any) -> Event:
        """Make an event about the last item."""
        return {
            "type": f"response.{kind}",
            "item_id": self._output[-1]["id"],
            "output_index": len(self._output) - 1,
            **fields,
        }

    def _item_event(self, kind: str) -> Event:
        """Make an event that contains the last item."""
        return {
            "type": f"response.output_item.{kind}",
            "output_index": len(self._output) - 1,
            "item": dict(self._output[-1]),
        }

    @property
    def _is_truncated(self) -> bool:
        return bool(self.ends) and self.ends[0].reason == "length"

    def _response(self) -> dict[str, Any]:
        """Return the response object so far."""
        body = self._body
        is_finished = bool(self.ends)
        status = "in_progress"
        if is_finished:
            status = "incomplete" if self._is_truncated else "completed"
        fields = body.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_truncated else None,
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
            "usage": self._usage() if is_finished else None,
        }
        if is_finished:
            response["x_dflash"] = self.drafting()
        return response

    def _usage(self) -> dict[str, Any]:
        """Return the usage with the names of this API."""
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
