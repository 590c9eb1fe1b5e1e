"""Ollama's API: POST /api/chat and /api/generate."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, Field
from pydantic_core import from_json, to_json

from ..answers.parts import Part, Reasoning, Text, ToolCall, joined
from .body import Body, ListOf
from .content import ContentPart, read_content
from .fields import (
    Effort,
    ModelName,
    SamplingOptions,
    Schema,
    TopLogprobs,
    thinking_settings,
)
from .generation_request import GenerationRequest, Tool, has_beginning
from .http_errors import RequestError
from .openai_chat import ChatFunction, ChatMessage
from .response import ApiResponse, Event, grow
from .steps import ResponseStream, StepOutput

# The version that we report, because clients refuse old servers: the first with /v1/responses.
VERSION: Final = "0.13.4"


class OllamaOptions(SamplingOptions):
    """How tokens are chosen. Options of Ollama's runtime are ignored."""

    unsupported = {**SamplingOptions.unsupported, "tfs_z": 1}

    num_predict: Annotated[int, Field(ge=-2)] | None = None  # a negative number is no limit


class OllamaMessage(ChatMessage):
    """A message of a conversation. The arguments of calls are objects."""

    images: ListOf[str] | None = None
    reasoning: Annotated[str | None, Field(alias="thinking")] = None
    name: Annotated[str | None, Field(alias="tool_name")] = None

    def for_template(self) -> dict[str, Any]:
        """Convert the message for a chat template."""
        if self.images:
            text = ContentPart(type="text", text=read_content(self.content, ""))
            self.content = [text, *[ContentPart(type="image")] * len(self.images)]
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
    top_logprobs: TopLogprobs | None = None

    def _request(
        self, prompt: str | list[dict[str, Any]], tools: Sequence[Tool] = ()
    ) -> GenerationRequest:
        """Make the internal request of a raw text, or of messages for a chat template."""
        is_raw = isinstance(prompt, str)
        return GenerationRequest(
            model=self.model,
            prompt=prompt,
            settings=self.options.settings(self.options.num_predict) if self.options else {},
            tools=tools,
            schema={"type": "object"} if self.format == "json" else self.format or None,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_settings=thinking_settings(self.think),
            continues_message=not isinstance(prompt, str) and has_beginning(prompt),
            prompt_field="prompt" if is_raw else "messages",
        )

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt unloads the model. Otherwise it loads the model."""
        seconds = _seconds(self.keep_alive)
        return seconds is not None and 0 <= seconds < 1

    def without_prompt(self, reason: str) -> dict[str, Any]:
        """Return the response to a request without a prompt, which loads or unloads a model."""
        return {**_head(self.model), **_content(self, ""), "done": True, "done_reason": reason}


class OllamaChatBody(OllamaBody):
    """POST /api/chat"""

    messages: ListOf[OllamaMessage] | None = None
    tools: ListOf[ChatFunction] | None = None

    def generation_request(self) -> GenerationRequest | None:
        """Convert to the internal request; None without messages. Raises `RequestError`."""
        if not self.messages:
            return None
        messages = [message.for_template() for message in self.messages]
        return self._request(messages, [tool.function.tool() for tool in self.tools or ()])


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate"""

    unsupported = {
        "context": [],
        "suffix": "",
        "template": "",
        "height": 0,
        "steps": 0,
        "width": 0,
    }

    prompt: str | None = None
    system: str | None = None
    images: ListOf[str] | None = None
    raw: bool | None = None

    def generation_request(self) -> GenerationRequest | None:
        """Convert to the internal request; None without a prompt. Raises `RequestError`."""
        if not self.prompt:
            return None
        if self.raw:
            if self.system or self.images:
                raise RequestError(
                    "With raw, the prompt is complete: leave out system and images.",
                    param="raw",
                )
            return self._request(self.prompt)
        messages = [OllamaMessage(role="user", content=self.prompt, images=self.images)]
        if self.system:
            messages.insert(0, OllamaMessage(role="system", content=self.system))
        return self._request([message.for_template() for message in messages])


_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(rf"([\d.]+)({'|'.join(_UNITS)})")


def _seconds(duration: float | str | None) -> float | None:
    """Parse a number of seconds, or a duration of Go such as 1h30m. Returns None for others."""
    if duration is None or isinstance(duration, float):
        return duration
    with suppress(ValueError):
        return float(duration)
    text = duration.strip().removeprefix("-")
    parts = _DURATION.findall(text)
    if not parts or "".join(map("".join, parts)) != text:
        return None
    with suppress(ValueError):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        return -seconds if duration.strip().startswith("-") else seconds
    return None


class OllamaPullBody(Body):
    """POST /api/pull"""

    model: Annotated[ModelName, Field(validation_alias=AliasChoices("model", "name"))]
    stream: bool | None = None


class OllamaShowBody(Body):
    """POST /api/show"""

    # "name" is the older name of the field.
    model: Annotated[ModelName, Field(validation_alias=AliasChoices("model", "name"))]


class OllamaResponse(ApiResponse):
    """The response to one request.

    Args:
        stream: the answer.
        body: the request.
        start: when the request arrived, on the monotonic clock.
    """

    media_type = "application/x-ndjson"

    def __init__(self, stream: ResponseStream, body: OllamaBody, start: float) -> None:
        super().__init__(stream)
        self._body = body
        self._start = start
        self._load_seconds = time.monotonic() - start  # for loading the model
        self._is_raw = stream.request.prompt_field == "prompt"

    def _step(self, step: StepOutput) -> Iterator[Event]:
        """Yield one piece, if there is something new."""
        if self._is_raw:
            piece = self._piece(step.event.text)
        elif step.parts or step.logprobs:
            piece = self._piece(joined(step.parts, Text), step.parts)
        else:
            return
        if step.logprobs:
            piece["logprobs"] = step.logprobs
        yield piece

    def _end(self) -> Iterator[Event]:
        [end] = self.ends
        stats = end.event.stats
        yield self._piece() | {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "prompt_eval_count": self._stream.prompt_tokens,
            "eval_count": stats.output_tokens,
            "total_duration": _nanoseconds(time.monotonic() - self._start),
            "load_duration": _nanoseconds(self._load_seconds),
            "prompt_eval_duration": _nanoseconds(stats.prefill_seconds),
            "eval_duration": _nanoseconds(stats.decode_seconds),
        }

    def _error(self, error: RequestError) -> Event:
        return error.ollama()

    def ping(self) -> Event:
        """Return a line without text."""
        return self._piece()

    def _add(self, event: Event) -> None:
        grow(self.result, event)

    def frame(self, event: Event) -> bytes:
        """Encode an event for the stream."""
        return to_json(event) + b"\n"

    def _piece(self, text: str = "", parts: Sequence[Part] = ()) -> Event:
        return {**_head(self.model), **_content(self._body, text, parts), "done": False}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _content(body: OllamaBody, text: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
    """Return a piece of the answer, in the fields of the response."""
    thinking = joined(parts, Reasoning)
    thought = {"thinking": thinking} if thinking else {}
    if isinstance(body, OllamaGenerateBody):
        return {"response": text, **thought}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
    for part in parts:
        if isinstance(part, ToolCall):
            function = {"name": part.name, "arguments": from_json(part.arguments)}
            message.setdefault("tool_calls", []).append({"id": part.id, "function": function})
    return {"message": message}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
