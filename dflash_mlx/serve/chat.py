"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import Field

from .body import Body, ListOf
from .errors import RequestError, new_id
from .handler import Finish, ResponseStream, StepOutput
from .logprobs import TokenLogprob
from .openai_common import (
    MAX_TOP_LOGPROBS,
    ContentPart,
    Effort,
    Function,
    ResponseFormat,
    SamplingBody,
    StreamOptions,
    drafting,
    format_logprob,
    read_content,
    step_drafting,
    template_call,
    thinking_settings,
    usage,
)
from .parts import Reasoning, Text
from .request import GenerationRequest, ToolChoice
from .sse import DONE, Frames, frame
from .tools import ToolCall


class ChatFunction(Body):
    """A tool, an earlier call or a choice; only functions are supported."""

    id: str = ""
    type: Literal["function"] | None = "function"
    function: Function


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: ListOf[ChatFunction] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        content = read_content(self.content, "") or self.refusal or ""
        message: dict[str, Any] = {"role": role, "content": content}
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                template_call(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatAllowedTools(Body):
    """The tools of `ChatAllowedChoice`."""

    mode: Literal["auto", "required"] = "auto"
    tools: ListOf[ChatFunction]


class ChatAllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ChatAllowedTools


class ChatBody(SamplingBody):
    """POST /v1/chat/completions"""

    messages: Annotated[ListOf[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: ListOf[ChatFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatFunction | ChatAllowedChoice | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    modalities: ListOf[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None

    def generation_request(self) -> GenerationRequest:
        """The internal request. Raises `RequestError`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
        form = self.response_format
        if form is not None and form.type == "json_schema" and form.json_schema is None:
            raise RequestError("json_schema is missing.", param="response_format.json_schema")
        limit = self.max_completion_tokens
        choice, allowed = self._tool_choice()
        return GenerationRequest(
            self.model,
            [message.for_template() for message in self.messages],
            self.settings(self.max_tokens if limit is None else limit),
            [tool.function.tool() for tool in self.tools or ()],
            choice,
            allowed,
            parallel_calls=self.parallel_tool_calls is not False
            and not isinstance(self.tool_choice, ChatFunction),
            schema=form.answer_schema() if form else None,
            n=self.n or 1,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_settings=thinking_settings(self.reasoning_effort)
            | (self.chat_template_kwargs or {}),
        )

    def _tool_choice(self) -> tuple[ToolChoice, frozenset[str] | None]:
        choice = self.tool_choice
        if isinstance(choice, ChatFunction):
            return "required", frozenset({choice.function.name})
        if isinstance(choice, ChatAllowedChoice):
            allowed = choice.allowed_tools
            return allowed.mode, frozenset(tool.function.name for tool in allowed.tools)
        return choice or "auto", None


class ChatChoice:
    """One answer, put together from its steps."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish: Finish | None = None

    def add(self, step: StepOutput) -> None:
        """Add a step."""
        for part in step.parts:
            if isinstance(part, Text):
                self.text += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            else:
                self.calls.append(part)
        if step.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *step.logprobs]
        self.finish = step.finish or self.finish

    def format(self, index: int) -> dict[str, Any]:
        """An item of the response's `choices`."""
        content = None if self.calls and not self.text else self.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_format_call(call) for call in self.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": _format_logprobs(self.logprobs),
            "finish_reason": self.finish.reason if self.finish else None,
        }


async def complete(stream: ResponseStream) -> dict[str, Any]:
    """The whole response. Raises `RequestError`."""
    choices = [ChatChoice() for _ in range(stream.request.n)]
    async for step in stream.steps():
        choices[step.choice].add(step)
    finishes = [one.finish for one in choices if one.finish is not None]
    return {
        **_head(stream, "chat.completion"),
        "choices": [one.format(index) for index, one in enumerate(choices)],
        "usage": usage(stream.prompt_tokens, finishes),
        "x_dflash": drafting(finishes),
    }


async def stream_frames(stream: ResponseStream, include_usage: bool) -> Frames:
    """The response as a stream, one item per decode step; an error is its last frame."""
    head = _head(stream, "chat.completion.chunk")
    chunk_head = head | {"usage": None} if include_usage else head

    def chunk(index: int, delta: dict[str, Any], extra: Any = None, **choice: Any) -> bytes:
        fields = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return frame({**chunk_head, "choices": [fields | choice], **(extra or {})})

    finishes: list[Finish] = []
    calls = [0] * stream.request.n  # so far, of each answer
    start = {"role": "assistant", "content": ""}
    yield b"".join(chunk(index, start) for index in range(stream.request.n))
    try:
        async for step in stream.steps():
            frames = []
            deltas = _deltas(step, calls)
            if deltas or step.logprobs:
                delta, *others = deltas or [{}]
                extra = {"x_dflash": step_drafting(step)}
                logprobs = _format_logprobs(step.logprobs)
                frames.append(chunk(step.choice, delta, extra, logprobs=logprobs))
                frames += [chunk(step.choice, delta) for delta in others]
            if step.finish is not None:
                finishes.append(step.finish)
                frames.append(chunk(step.choice, {}, finish_reason=step.finish.reason))
            if frames:
                yield b"".join(frames)
    except RequestError as error:
        yield frame(error.openai())
        return
    if include_usage:
        total = usage(stream.prompt_tokens, finishes)
        yield frame(head | {"choices": [], "usage": total, "x_dflash": drafting(finishes)}) + DONE
    else:
        yield DONE


def _deltas(step: StepOutput, calls: list[int]) -> list[dict[str, Any]]:
    """The deltas of a step; `calls` counts the calls of each answer."""
    deltas: list[dict[str, Any]] = []
    for part in step.parts:
        if isinstance(part, Text):
            deltas.append({"content": part.text})
        elif isinstance(part, Reasoning):
            deltas.append({"reasoning_content": part.text, "reasoning": part.text})
        else:
            deltas.append({"tool_calls": [{"index": calls[step.choice], **_format_call(part)}]})
            calls[step.choice] += 1
    return deltas


def _head(stream: ResponseStream, kind: str) -> dict[str, Any]:
    return {
        "id": new_id("chatcmpl-"),
        "object": kind,
        "created": int(time.time()),
        "model": stream.request.model,
    }


def _format_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _format_logprobs(tokens: list[TokenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {"content": [format_logprob(token) for token in tokens], "refusal": None}
