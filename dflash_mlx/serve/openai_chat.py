"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from ..answers.parts import Part, Reasoning, Text
from .body import Body, ListOf
from .content import ContentPart, ListOfParts, read_content, read_message
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
from .generation_request import GenerationRequest
from .http_errors import RequestError
from .openai_common import ChoicesBody
from .response import ChoicesResponse, Event, step_drafting
from .steps import StepOutput

# Fields in which litellm, OpenRouter and Ollama's clients repeat a message's reasoning, with
# signatures that only other servers can check. The text itself is in `reasoning_content`.
UNREAD_REASONING: Final = ("thinking", "thinking_blocks", "reasoning_details")


class ChatFunction(Body):
    """A tool. Only functions are supported."""

    type: Literal["function"] | None = "function"
    function: Function


class CustomCall(Body):
    """An earlier call of a custom tool, which takes text."""

    name: str = ""
    input: str | None = None


class ChatCall(Body):
    """An earlier call."""

    id: str | None = None
    function: Function | None = None
    custom: CustomCall | None = None

    def for_template(self) -> dict[str, Any]:
        """Convert the call for a chat template."""
        if self.custom is not None:
            return template_call(self.id, self.custom.name, {"input": self.custom.input or ""})
        function = self.function or Function()
        return template_call(self.id, function.name, function.arguments)


class ChatMessage(Body):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")  # so that `ignored` sees the unknown fields

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
    prefix: bool | None = None  # whether the answer continues this message, the last one

    @property
    def ignored(self) -> list[str]:
        """Names of the fields with reasoning that the message has and the server does not read."""
        unknown_fields = self.model_extra or {}
        return [f"messages.{name}" for name in UNREAD_REASONING if unknown_fields.get(name)]

    def for_template(self) -> dict[str, Any]:
        """Convert the message for a chat template."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content = self._all_content()
        thoughts = ""
        if isinstance(content, list):
            thinking = [read_content(part.thinking, "") for part in content if part.is_thinking]
            thoughts = "\n".join(thinking)
            content = [part for part in content if not part.is_thinking]
        message = read_message(role, content, "")
        reasoning = self.reasoning_content or self.reasoning or thoughts
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = list(self.tool_calls or ())
        if self.function_call:
            calls.append(ChatCall(function=self.function_call))
        if calls:
            message["tool_calls"] = [call.for_template() for call in calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message

    def _all_content(self) -> str | list[ContentPart] | None:
        """Return the content, with the refusal and the audio that other fields hold."""
        others = []
        if self.refusal:
            others.append(ContentPart(type="refusal", refusal=self.refusal))
        if self.audio is not None:
            others.append(ContentPart(type="audio"))
        if not others:
            return self.content
        if isinstance(self.content, str):
            return [ContentPart(type="text", text=self.content), *others]
        return [*(self.content or ()), *others]


class ChatBody(ChoicesBody):
    """POST /v1/chat/completions"""

    unsupported = {
        **ChoicesBody.unsupported,
        "audio": None,
        "function_call": None,
        "functions": None,
        "modalities": ["text"],
        "moderation": None,
        "web_search_options": None,
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
    add_generation_prompt: bool | None = None

    def generation_request(self) -> GenerationRequest:
        """Convert to the internal request. Raises `RequestError`."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        return GenerationRequest(
            model=self.model,
            prompt=[message.for_template() for message in self.messages],
            settings=self.settings(max_tokens),
            tools=[tool.function.tool() for tool in self.tools or ()],
            **read_tool_choice(self.tool_choice, self.parallel_tool_calls),
            schema=self.answer_schema(),
            n=self.n or 1,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_settings=self._thinking() | (self.chat_template_kwargs or {}),
            continues_message=self._continues_message(),
            ignored=self._ignored(),
        )

    def _continues_message(self) -> bool:
        """Return whether the answer continues the last message. Raises `RequestError`."""
        continues = bool(self.continue_final_message or self.messages[-1].prefix)
        if self.add_generation_prompt is False and not continues:
            raise RequestError(
                "add_generation_prompt: false needs continue_final_message: true.",
                param="add_generation_prompt",
            )
        if self.add_generation_prompt and continues:
            raise RequestError(
                "add_generation_prompt: true would begin a new message, but the request continues "
                "the last one.",
                param="add_generation_prompt",
            )
        return continues

    def _ignored(self) -> list[str]:
        """Return the names of what is ignored in the messages and in `thinking`."""
        names = list(self.thinking.ignored) if self.thinking else []
        for message in self.messages:
            names += message.ignored
        return names

    def _thinking(self) -> dict[str, Any]:
        """Return the chat template's variables for thinking, which four fields may set."""
        settings = thinking_settings(self.enable_thinking)
        if self.thinking:
            settings |= self.thinking.template_settings()
        if self.reasoning:
            settings |= self.reasoning.template_settings()
        return settings | thinking_settings(self.reasoning_effort)


class ChatResponse(ChoicesResponse):
    """The response to one request."""

    _prefix = "chatcmpl-"
    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def _begin(self) -> Iterator[Event]:
        self._calls = [0] * self._stream.size  # the number of calls in each answer
        for index in range(self._stream.size):
            yield self._chunk(self._delta(index, {"role": "assistant", "content": ""}))

    def _step(self, step: StepOutput) -> Iterator[Event]:
        """Yield an event for each part, and one for the end of an answer."""
        deltas = [self._part(step.choice, part) for part in step.parts]
        if step.logprobs and not deltas:
            deltas = [{}]
        for index, delta in enumerate(deltas):
            if index > 0:
                yield self._chunk(self._delta(step.choice, delta))
                continue
            # The first event of a step also has the log-probabilities, and what was drafted.
            logprobs = None
            if step.logprobs is not None:
                logprobs = {"content": step.logprobs, "refusal": None}
            first = self._delta(step.choice, delta, logprobs=logprobs)
            yield self._chunk(first, x_dflash=step_drafting(step))
        if step.reason is not None:
            yield self._chunk(self._delta(step.choice, {}, finish_reason=step.reason))

    def _add(self, event: Event) -> None:
        super()._add(event)
        if event["choices"]:
            return
        # The last event: turn the combined deltas into messages.
        for choice in self.result["choices"]:
            message = choice.pop("delta") | {"refusal": None}
            choice["message"] = message
            for call in message.get("tool_calls", ()):
                del call["index"]
                message["content"] = message["content"] or None

    def _delta(self, index: int, delta: Any = None, **more: Any) -> dict[str, Any]:
        fields = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": None}
        return fields | more

    def _part(self, choice: int, part: Part) -> dict[str, Any]:
        """Return the delta of a part of an answer."""
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text, "reasoning": part.text}
        function = {"name": part.name, "arguments": part.arguments}
        call = {
            "index": self._calls[choice],
            "id": part.id,
            "type": "function",
            "function": function,
        }
        self._calls[choice] += 1
        return {"tool_calls": [call]}
