"""Ollama's API: POST /api/chat and /api/generate."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, Field
from pydantic_core import to_json

from ..answers.parser import Part, Reasoning, Text, ToolCall, joined
from .body import Body, ListOf
from .chat import ChatFunction, ChatMessage
from .errors import RequestError
from .handler import ResponseStream
from .openai_common import (
    MAX_TOP_LOGPROBS,
    ContentPart,
    Effort,
    ModelName,
    Nothing,
    SamplingOptions,
    Schema,
    read_content,
    thinking_settings,
)
from .request import GenerationRequest, Tool
from .response import ApiResponse, format_logprob
from .steps import StepOutput

VERSION: Final = "0.13.0"  # of Ollama's API; editors refuse servers of old ones


class OllamaOptions(SamplingOptions):
    """How tokens are chosen. Options of Ollama's own runtime are ignored."""

    num_predict: Annotated[int, Field(ge=-2)] | None = None  # negative: no limit
    tfs_z: Literal[1] | None = None


class OllamaMessage(ChatMessage):
    """A message of a conversation; calls have their arguments as an object."""

    images: ListOf[str] | None = None
    reasoning: Annotated[str | None, Field(alias="thinking")] = None
    name: Annotated[str | None, Field(alias="tool_name")] = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        parts = [ContentPart(type="text", text=read_content(self.content, ""))]
        parts += [ContentPart(type="image")] * len(self.images or ())
        self.content = parts if self.images else self.content
        return super().for_template()


class OllamaBody(Body):
    """The fields that chat and generate share."""

    model: ModelName
    stream: bool | None = None
    format: Literal["", "json"] | Schema | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    think: bool | Effort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def _request(
        self, prompt: str | Sequence[OllamaMessage], tools: Sequence[Tool] = ()
    ) -> GenerationRequest:
        is_text = isinstance(prompt, str)
        return GenerationRequest(
            self.model,
            prompt if isinstance(prompt, str) else [one.for_template() for one in prompt],
            self.options.settings(self.options.num_predict) if self.options else {},
            tools,
            schema={"type": "object"} if self.format == "json" else self.format or None,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_settings=thinking_settings(self.think),
            prompt_field="prompt" if is_text else "messages",
        )

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt has a model unloaded, not loaded."""
        return str(self.keep_alive) in ("0", "0.0", "0s", "0m")

    def without_prompt(self, reason: str) -> dict[str, Any]:
        """The response to a request without a prompt, which has a model loaded or unloaded."""
        return {**_head(self.model), **_content(self, ""), "done": True, "done_reason": reason}


class OllamaChatBody(OllamaBody):
    """POST /api/chat"""

    messages: ListOf[OllamaMessage] | None = None
    tools: ListOf[ChatFunction] | None = None

    def generation_request(self) -> GenerationRequest | None:
        """The internal request; None without messages. Raises `RequestError`."""
        if not self.messages:
            return None
        return self._request(self.messages, [tool.function.tool() for tool in self.tools or ()])


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate"""

    prompt: str | None = None
    system: str | None = None
    images: ListOf[str] | None = None
    raw: bool | None = None
    context: Nothing = None
    height: Literal[0] | None = None
    steps: Literal[0] | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    width: Literal[0] | None = None

    def generation_request(self) -> GenerationRequest | None:
        """The internal request; None without a prompt. Raises `RequestError`."""
        if not self.prompt:
            return None
        if self.raw:
            if self.system or self.images:
                raise RequestError("A raw prompt is the whole prompt.", param="raw")
            return self._request(self.prompt)
        messages = [OllamaMessage(role="user", content=self.prompt, images=self.images)]
        if self.system:
            messages.insert(0, OllamaMessage(role="system", content=self.system))
        return self._request(messages)


class OllamaShowBody(Body):
    """POST /api/show"""

    # The second name is the older one.
    model: Annotated[ModelName, Field(validation_alias=AliasChoices("model", "name"))]


class OllamaResponse(ApiResponse):
    """The response to one request.

    Args:
        body: the request.
        streams: the answer.
        start: when the request came, on the monotonic clock.
    """

    media_type = "application/x-ndjson"

    def __init__(self, body: OllamaBody, streams: Sequence[ResponseStream], start: float) -> None:
        super().__init__(streams)
        self._body, self._start = body, start
        self._load_seconds = time.monotonic() - start  # of the model, if it was not loaded
        self._is_raw = streams[0].request.prompt_field == "prompt"

    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""
        (answer,) = await self.answers()
        return self._piece(answer) | self._end()

    async def _frames(self) -> AsyncIterator[bytes]:
        async for step in self.steps():
            if step.parts or step.logprobs or self._is_raw:
                yield _line(self._piece(step))
        yield _line(self._piece() | self._end())

    def _error_frame(self, error: RequestError) -> bytes:
        return _line(error.ollama())

    def ping(self) -> bytes:
        """A line without text."""
        return _line(self._piece())

    def _piece(self, step: StepOutput | None = None) -> dict[str, Any]:
        content = _content(self._body, "")
        if step is not None and self._is_raw:
            content = _content(self._body, step.raw)
        elif step is not None:
            content = _content(self._body, joined(step.parts, Text), step.parts)
        if step is not None and step.logprobs:
            content["logprobs"] = list(map(format_logprob, step.logprobs))
        return _head(self.model) | content | {"done": False}

    def _end(self) -> dict[str, Any]:
        """Why the answer ended, tokens, and nanoseconds."""
        (finish,) = self.finishes
        stats = finish.stats
        seconds = {
            "total": time.monotonic() - self._start,
            "load": self._load_seconds,
            "prompt_eval": stats.prefill_seconds,
            "eval": stats.decode_seconds,
        }
        return {
            "done": True,
            "done_reason": "length" if finish.reason == "length" else "stop",
            "prompt_eval_count": self.prompt_tokens,
            "eval_count": stats.output_tokens,
            **{f"{name}_duration": int(value * 1e9) for name, value in seconds.items()},
        }


def _content(body: OllamaBody, text: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
    """A piece of the answer, in the fields of the response."""
    thinking = joined(parts, Reasoning)
    thought = {"thinking": thinking} if thinking else {}
    if isinstance(body, OllamaGenerateBody):
        return {"response": text, **thought}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
    for call in parts:
        if isinstance(call, ToolCall):
            function = {"name": call.name, "arguments": json.loads(call.arguments)}
            message.setdefault("tool_calls", []).append({"id": call.id, "function": function})
    return {"message": message}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _line(content: dict[str, Any]) -> bytes:
    return to_json(content) + b"\n"
