"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ..answers.parser import Reasoning, Text, ToolCall
from .body import Body, ListOf
from .errors import RequestError, new_id
from .handler import Finish, ResponseStream, StepOutput
from .logprobs import TokenLogprob
from .openai_common import (
    MAX_TOP_LOGPROBS,
    ChoiceName,
    ContentPart,
    Effort,
    Function,
    MaxTokens,
    ReasoningOptions,
    SamplingBody,
    StreamOptions,
    Thinking,
    drafting,
    format_logprob,
    read_message,
    step_drafting,
    template_call,
    thinking_settings,
    usage,
)
from .request import GenerationRequest, ToolChoice
from .sse import DONE, Frames, frame


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
        message = read_message(role, self.content or self.refusal, "")
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
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: ListOf[ChatFunction] | None = None
    tool_choice: ChoiceName | ChatFunction | ChatAllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    modalities: ListOf[Literal["text"]] | None = None
    moderation: None = None
    web_search_options: None = None

    def generation_request(self) -> GenerationRequest:
        """The internal request. Raises `RequestError`."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
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
            schema=self.answer_schema(),
            n=self.n or 1,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_settings=self._thinking() | (self.chat_template_kwargs or {}),
            continues_message=bool(self.continue_final_message),
        )

    def _thinking(self) -> dict[str, Any]:
        """The chat template's variables for thinking."""
        settings = thinking_settings(self.enable_thinking)
        if self.thinking is not None:
            settings["enable_thinking"] = self.thinking.type != "disabled"
        if self.reasoning is not None:
            settings |= self.reasoning.template_settings()
        return settings | thinking_settings(self.reasoning_effort)

    def _tool_choice(self) -> tuple[ToolChoice, frozenset[str] | None]:
        choice = self.tool_choice
        if isinstance(choice, ChatFunction):
            return "required", frozenset({choice.function.name})
        if isinstance(choice, ChatAllowedChoice):
            allowed = choice.allowed_tools
            return allowed.mode, frozenset(tool.function.name for tool in allowed.tools)
        return "required" if choice == "any" else choice or "auto", None


class ChatResponse:
    """The response to one request, whole or as a stream.

    Args:
        stream: the answers.
        include_usage: whether the last chunk of the stream has the usage.
    """

    def __init__(self, stream: ResponseStream, include_usage: bool = False) -> None:
        self._stream, self._include_usage = stream, include_usage
        self._finishes: list[Finish] = []
        self._head = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": stream.request.model,
        }

    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""
        steps: list[list[StepOutput]] = [[] for _ in range(self._stream.request.n)]
        async for step in self._stream.steps():
            steps[step.choice].append(step)
        choices = [_format_choice(index, one) for index, one in enumerate(steps)]
        self._finishes = [one[-1].finish for one in steps if one[-1].finish is not None]
        return self._head | {"object": "chat.completion", "choices": choices} | self._totals()

    def _totals(self) -> dict[str, Any]:
        total = usage(self._stream.prompt_tokens, self._finishes)
        return {"usage": total, "x_dflash": drafting(self._finishes)}

    async def frames(self) -> Frames:
        """One item per decode step; an error is the last frame."""
        calls = [0] * self._stream.request.n  # so far, of each answer
        start = {"role": "assistant", "content": ""}
        yield b"".join(self._chunk(index, start) for index in range(self._stream.request.n))
        try:
            async for step in self._stream.steps():
                frames = []
                deltas = _deltas(step, calls)
                if deltas or step.logprobs:
                    delta, *others = deltas or [{}]
                    extra = {"x_dflash": step_drafting(step)}
                    logprobs = _format_logprobs(step.logprobs)
                    frames.append(self._chunk(step.choice, delta, extra, logprobs=logprobs))
                    frames += [self._chunk(step.choice, delta) for delta in others]
                if step.finish is not None:
                    self._finishes.append(step.finish)
                    frames.append(self._chunk(step.choice, {}, finish_reason=step.finish.reason))
                if frames:
                    yield b"".join(frames)
        except RequestError as error:
            yield frame(error.openai())
            return
        totals = frame(self._head | {"choices": []} | self._totals())
        yield totals + DONE if self._include_usage else DONE

    def ping(self) -> bytes:
        """A chunk without a delta, of the answer that is not finished."""
        return self._chunk(min(len(self._finishes), self._stream.request.n - 1), {})

    def _chunk(self, index: int, delta: dict[str, Any], extra: Any = None, **choice: Any) -> bytes:
        fields = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        content = self._head | {"choices": [fields | choice]} | (extra or {})
        return frame({"usage": None} | content if self._include_usage else content)


def _format_choice(index: int, steps: Sequence[StepOutput]) -> dict[str, Any]:
    """An item of the response's `choices`."""
    parts = [part for step in steps for part in step.parts]
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [_format_call(part) for part in parts if isinstance(part, ToolCall)]
    content = None if calls and not text else text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    tokens = [token for step in steps for token in step.logprobs or ()]
    finish = steps[-1].finish
    return {
        "index": index,
        "message": message,
        "logprobs": _format_logprobs(None if steps[0].logprobs is None else tokens),
        "finish_reason": finish.reason if finish else None,
    }


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


def _format_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _format_logprobs(tokens: list[TokenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {"content": [format_logprob(token) for token in tokens], "refusal": None}
