"""OpenAI's responses: POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

from pydantic_core import from_json

from ..answers.parser import Part, Text, ToolCall
from .body import Body, ListOf
from .errors import RequestError, new_id
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
from .request import GenerationRequest, Tool
from .response import Event, ItemsResponse
from .responses_input import CALLS, CUSTOM_INPUT, InputItem, Item, RecordItem, messages_of
from .steps import ResponseStream, StepOutput

_FIELDS: Final = dict(zip(CALLS, ("arguments", CUSTOM_INPUT), strict=True))  # of a call's text
INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"


class TextOptions(Body):
    """How the answer is written."""

    format: ResponseFormat | None = None


class ResponsesTool(Function):
    """A function, a namespace of functions, or a tool of OpenAI's, which is left out.

    A custom tool, as Codex's apply_patch, takes text. The model reads it as a function with one
    argument, and `format` (a grammar) as a part of its description.
    """

    type: str
    tools: ListOf[ResponsesTool] | None = None
    format: dict[str, Any] | None = None

    def custom_tool(self) -> Tool:
        """The internal tool of a custom one. Raises `RequestError` if it has no name."""
        grammar = (self.format or {}).get("definition")
        described = [self.description or "", f"The input follows this grammar:\n{grammar}"]
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
        }
        text = "\n\n".join(described[: 1 + bool(grammar)])
        return Function(name=self.name, description=text, parameters=schema).tool()


class ResponsesBody(SamplingOptions):
    """POST /v1/responses and /v1/responses/input_tokens"""

    unsupported = {
        **SamplingOptions.unsupported,
        **dict.fromkeys(("conversation", "max_tool_calls", "moderation", "personality", "prompt")),
        **dict.fromkeys(("max_tokens", "response_format")),  # of chat completions
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
        """The input."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input

    def generation_request(self, items: Sequence[InputItem | RecordItem]) -> GenerationRequest:
        """The internal request of a conversation's items. Raises `RequestError`."""
        form = self.text.format if self.text else None
        return GenerationRequest(
            self.model,
            self._messages(items),
            self.settings(self.max_output_tokens),
            [tool for _, _, tool in self.functions],
            **read_tool_choice(self.tool_choice, self.parallel_tool_calls),
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

    def _messages(self, items: Sequence[InputItem | RecordItem]) -> list[dict[str, Any]]:
        messages = messages_of(items)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise RequestError("The input is empty.", param="input")
        return messages


class ResponsesResponse(ItemsResponse):
    """One response, put together from its steps.

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
        self._body, self._store, self._id = body, store, new_id("resp_")
        self._output: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []  # for the next text
        self._number = -1  # of the stream's last event
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
        """The event that the response goes on."""
        return {"type": "response.in_progress", "response": self._response()}

    def _add(self, event: Event) -> None:
        self.result = event.get("response", self.result)

    def frame(self, event: Event) -> bytes:
        """An event as the stream has it, with its number."""
        self._number += 1
        return super().frame(event | {"sequence_number": self._number})

    def _open(self, part: Part) -> Iterator[Event]:
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"status": "in_progress", "content": []}
        if isinstance(part, ToolCall):
            namespace, name = self._names.get(part.name, (None, part.name))
            is_custom = namespace is None and name in self._custom
            kind, id = CALLS[is_custom], self._item_id("ctc_" if is_custom else "fc_")
            item = {"type": kind, "id": id, "call_id": part.id, "name": name}
            item |= {_FIELDS[kind]: "", "status": "in_progress"}
            item |= {"namespace": namespace} if namespace else {}
        elif isinstance(part, Text):
            item |= {"type": "message", "id": self._item_id("msg_"), "role": "assistant"}
            content |= {"type": "output_text", "annotations": [], "logprobs": []}
        else:
            item |= {"type": "reasoning", "id": self._item_id("rs_"), "summary": []}
        self._output.append(item)
        yield self._item_event("added")
        if "content" in item:
            item["content"] = [content]
            yield self._event("content_part.added", content_index=0, part=dict(content))

    def _grow(self, part: Part) -> Iterator[Event]:
        item = self._output[-1]
        if isinstance(part, ToolCall):
            text, field = part.arguments, _FIELDS[item["type"]]
            item[field] = from_json(text).get(field, text) if field == CUSTOM_INPUT else text
            yield self._event(f"{item['type']}_{field}.delta", delta=item[field])
            return
        [content] = item["content"]
        content["text"] += part.text
        event = self._event(f"{content['type']}.delta", content_index=0, delta=part.text)
        if isinstance(part, Text):
            event["logprobs"], self._logprobs = self._logprobs, []
            content["logprobs"] += event["logprobs"]
        yield event

    def _close(self) -> Iterator[Event]:
        item = self._output[-1]
        item["status"] = "completed"
        if field := _FIELDS.get(item["type"]):
            done = {field: item[field], "name": item["name"]}
            yield self._event(f"{item['type']}_{field}.done", **done)
        else:
            item["status"] = "incomplete" if self._truncated else "completed"
            [content] = item["content"]
            done = {key: content[key] for key in ("text", "logprobs") if key in content}
            yield self._event(f"{content['type']}.done", content_index=0, **done)
            yield self._event("content_part.done", content_index=0, part=dict(content))
        yield self._item_event("done")

    def _item_id(self, prefix: str) -> str:
        """The next item's id, from which `ResponseStore` knows the response."""
        return f"{prefix}{self._id.removeprefix('resp_')}_{len(self._output)}"

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event about the last item."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    def _item_event(self, kind: str) -> Event:
        index, item = len(self._output) - 1, dict(self._output[-1])
        return {"type": f"response.output_item.{kind}", "output_index": index, "item": item}

    @property
    def _truncated(self) -> bool:
        return bool(self.ends) and self.ends[0].reason == "length"

    def _response(self) -> dict[str, Any]:
        """The response object so far."""
        body, finished = self._body, bool(self.ends)
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
