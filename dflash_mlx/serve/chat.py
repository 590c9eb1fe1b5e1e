"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from ..answers.parser import Part, Reasoning, Text
from .body import Body, ListOf
from .content import ContentPart, ListOfParts, read_content, read_message
from .errors import RequestError
from .fields import (
    Effort,
    Function,
    MaxTokens,
    ReasoningOptions,
    ThinkingConfig,
    ToolChoiceField,
    TopLogprobs,
    read_tool_choice,
    template_call,
    thinking_settings,
)
from .openai_common import ChoicesBody
from .request import GenerationRequest
from .response import ChoicesResponse, Event, step_drafting
from .steps import StepOutput


class ChatFunction(Body):
    """A tool; only functions are supported."""

    type: Literal["function"] | None = "function"
    function: Function


class CustomCall(Body):
    """An earlier call of a custom tool, with text."""

    name: str = ""
    input: str | None = None


class ChatCall(Body):
    """An earlier call."""

    id: str | None = None
    function: Function | None = None
    custom: CustomCall | None = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        if self.custom is not None:
            return template_call(self.id, self.custom.name, {"input": self.custom.input or ""})
        function = self.function or Function()
        return template_call(self.id, function.name, function.arguments)


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ListOfParts[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: ListOf[ChatCall] | None = None
    function_call: Function | None = None  # the older name of a call
    audio: dict[str, Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    prefix: bool | None = None  # whether the answer continues it, the last one

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content = self.content
        more = [ContentPart(type="refusal", refusal=self.refusal)] if self.refusal else []
        more += [ContentPart(type="audio")] if self.audio is not None else []
        if more:
            text = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
            content = [*(text or ()), *more]
        thoughts = ""
        if isinstance(content, list):
            thinking = [part.thinking for part in content if part.type == "thinking"]
            thoughts = "\n".join(read_content(one, "") for one in thinking)
            content = [part for part in content if part.type != "thinking"]
        message = read_message(role, content, "")
        if reasoning := self.reasoning_content or self.reasoning or thoughts:
            message["reasoning_content"] = reasoning
        calls = list(self.tool_calls or ())
        calls += [ChatCall(function=self.function_call)] if self.function_call else []
        if calls:
            message["tool_calls"] = [call.for_template() for call in calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatBody(ChoicesBody):
    """POST /v1/chat/completions"""

    unsupported = {
        **ChoicesBody.unsupported,
        **dict.fromkeys(("audio", "function_call", "functions", "moderation")),
        **{"modalities": ["text"], "web_search_options": None},
    }

    messages: Annotated[ListOf[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: ListOf[ChatFunction] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    def generation_request(self) -> GenerationRequest:
        """The internal request. Raises `RequestError`."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
        limit = self.max_completion_tokens
        return GenerationRequest(
            self.model,
            [message.for_template() for message in self.messages],
            self.settings(self.max_tokens if limit is None else limit),
            [tool.function.tool() for tool in self.tools or ()],
            **read_tool_choice(self.tool_choice, self.parallel_tool_calls),
            schema=self.answer_schema(),
            n=self.n or 1,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_settings=self._thinking() | (self.chat_template_kwargs or {}),
            continues_message=bool(self.continue_final_message or self.messages[-1].prefix),
            ignored=self.thinking.ignored if self.thinking else (),
        )

    def _thinking(self) -> dict[str, Any]:
        settings = thinking_settings(self.enable_thinking)
        for one in (self.thinking, self.reasoning):
            settings |= one.template_settings() if one else {}
        return settings | thinking_settings(self.reasoning_effort)


class ChatResponse(ChoicesResponse):
    """The response to one request."""

    _prefix, _kind, _chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _begin(self) -> Iterator[Event]:
        self._calls = [0] * self._stream.size  # so far, of each answer
        for index in range(self._stream.size):
            yield self._chunk(self._delta(index, {"role": "assistant", "content": ""}))

    def _step(self, step: StepOutput) -> Iterator[Event]:
        """An event for each part, and one for the end of an answer."""
        deltas = [self._part(step.choice, part) for part in step.parts]
        if deltas or step.logprobs:
            delta, *others = deltas or [{}]
            tokens = step.logprobs
            logprobs = None if tokens is None else {"content": tokens, "refusal": None}
            first = self._delta(step.choice, delta, logprobs=logprobs)
            yield self._chunk(first, x_dflash=step_drafting(step))
            yield from (self._chunk(self._delta(step.choice, delta)) for delta in others)
        if step.reason is not None:
            yield self._chunk(self._delta(step.choice, {}, finish_reason=step.reason))

    def _add(self, event: Event) -> None:
        super()._add(event)
        for choice in self.result["choices"] if not event["choices"] else ():
            message = choice["message"] = choice.pop("delta") | {"refusal": None}
            for call in message.get("tool_calls", ()):
                del call["index"]
                message["content"] = message["content"] or None

    def _delta(self, index: int, delta: Any = None, **more: Any) -> dict[str, Any]:
        fields = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": None}
        return fields | more

    def _part(self, choice: int, part: Part) -> dict[str, Any]:
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text, "reasoning": part.text}
        index, self._calls[choice] = self._calls[choice], self._calls[choice] + 1
        function = {"name": part.name, "arguments": part.arguments}
        call = {"index": index, "id": part.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
