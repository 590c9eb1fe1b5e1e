"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from ..answers.parser import Reasoning, Text, ToolCall, joined
from .body import Body, ListOf
from .errors import RequestError
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
    ThinkingConfig,
    read_message,
    template_call,
    thinking_settings,
)
from .request import GenerationRequest, ToolChoice
from .response import ChoicesResponse, format_logprob, step_drafting
from .steps import StepOutput


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
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: ListOf[ChatFunction] | None = None
    tool_choice: ChoiceName | ChatFunction | ChatAllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingConfig | None = None
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


class ChatResponse(ChoicesResponse):
    """The response to one request."""

    _prefix, _kind, _chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls = [0] * self.choices  # so far, of each answer

    def _choice(self, answer: StepOutput) -> dict[str, Any]:
        calls = [_format_call(part) for part in answer.parts if isinstance(part, ToolCall)]
        text, reasoning = (joined(answer.parts, kind) for kind in (Text, Reasoning))
        content = None if calls and not text else text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": answer.choice,
            "message": message,
            "logprobs": _format_logprobs(answer.logprobs),
            "finish_reason": answer.reason,
        }

    async def _frames(self) -> AsyncIterator[bytes]:
        start = {"role": "assistant", "content": ""}
        yield b"".join(self._chunk(self._delta(at, start)) for at in range(self.choices))
        async for content in super()._frames():
            yield content

    def _chunks(self, step: StepOutput) -> Iterator[bytes]:
        deltas = list(self._deltas(step))
        if deltas or step.logprobs:
            delta, *others = deltas or [{}]
            first = self._delta(step.choice, delta, logprobs=_format_logprobs(step.logprobs))
            yield self._chunk(first, x_dflash=step_drafting(step))
            yield from (self._chunk(self._delta(step.choice, delta)) for delta in others)
        if step.finish is not None:
            yield self._chunk(self._delta(step.choice, {}, finish_reason=step.reason))

    def _delta(self, index: int, delta: Any = None, **more: Any) -> dict[str, Any]:
        fields = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": None}
        return fields | more

    def _deltas(self, step: StepOutput) -> Iterator[dict[str, Any]]:
        for part in step.parts:
            if isinstance(part, Text):
                yield {"content": part.text}
            elif isinstance(part, Reasoning):
                yield {"reasoning_content": part.text, "reasoning": part.text}
            else:
                index = self._calls[step.choice]
                yield {"tool_calls": [{"index": index, **_format_call(part)}]}
                self._calls[step.choice] += 1


def _format_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _format_logprobs(tokens: list[TokenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {"content": [format_logprob(token) for token in tokens], "refusal": None}
