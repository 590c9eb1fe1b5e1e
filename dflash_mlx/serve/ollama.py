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

from ..answers.parser import Part, Reasoning, Text, ToolCall, joined
from .body import Body, ListOf
from .chat import ChatFunction, ChatMessage
from .content import ContentPart, read_content
from .errors import RequestError
from .fields import (
    Effort,
    ModelName,
    SamplingOptions,
    Schema,
    TopLogprobs,
    thinking_settings,
)
from .request import GenerationRequest, Tool, has_beginning
from .response import ApiResponse, Event, grow
from .steps import ResponseStream, StepOutput

VERSION: Final = "0.13.4"  # the first with /v1/responses; clients refuse servers of old ones


class OllamaOptions(SamplingOptions):
    """How tokens are chosen. Options of Ollama's own runtime are ignored."""

    unsupported = {**SamplingOptions.unsupported, "tfs_z": 1}

    num_predict: Annotated[int, Field(ge=-2)] | None = None  # negative: no limit


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
    top_logprobs: TopLogprobs | None = None

    def _request(
        self, prompt: str | list[dict[str, Any]], tools: Sequence[Tool] = ()
    ) -> GenerationRequest:
        """The internal request of a raw text, or of messages as templates take them."""
        return GenerationRequest(
            self.model,
            prompt,
            self.options.settings(self.options.num_predict) if self.options else {},
            tools,
            schema={"type": "object"} if self.format == "json" else self.format or None,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_settings=thinking_settings(self.think),
            continues_message=not isinstance(prompt, str) and has_beginning(prompt),
            prompt_field="prompt" if isinstance(prompt, str) else "messages",
        )

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt has a model unloaded, not loaded."""
        seconds = _seconds(self.keep_alive)
        return seconds is not None and 0 <= seconds < 1

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
        messages = [one.for_template() for one in self.messages]
        return self._request(messages, [tool.function.tool() for tool in self.tools or ()])


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate"""

    unsupported = {
        **{"context": [], "suffix": "", "template": ""},
        **dict.fromkeys(("height", "steps", "width"), 0),
    }

    prompt: str | None = None
    system: str | None = None
    images: ListOf[str] | None = None
    raw: bool | None = None

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
        return self._request([one.for_template() for one in messages])


_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(rf"([\d.]+)({'|'.join(_UNITS)})")


def _seconds(duration: float | str | None) -> float | None:
    """Seconds of a number, or of a duration as Go writes it, such as 1h30m; None for neither."""
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

    # The second name is the older one.
    model: Annotated[ModelName, Field(validation_alias=AliasChoices("model", "name"))]


class OllamaResponse(ApiResponse):
    """The response to one request.

    Args:
        stream: the answer.
        body: the request.
        start: when the request came, on the monotonic clock.
    """

    media_type = "application/x-ndjson"

    def __init__(self, stream: ResponseStream, body: OllamaBody, start: float) -> None:
        super().__init__(stream)
        self._body, self._start = body, start
        self._load_seconds = time.monotonic() - start  # of the model, if it was not loaded
        self._is_raw = stream.request.prompt_field == "prompt"

    def _step(self, step: StepOutput) -> Iterator[Event]:
        """One piece, if there is something new."""
        if self._is_raw:
            piece = self._piece(step.event.text)
        elif step.parts or step.logprobs:
            piece = self._piece(joined(step.parts, Text), step.parts)
        else:
            return
        yield piece | ({"logprobs": step.logprobs} if step.logprobs else {})

    def _end(self) -> Iterator[Event]:
        [end] = self.ends
        stats = end.event.stats
        seconds = {
            "total": time.monotonic() - self._start,
            "load": self._load_seconds,
            "prompt_eval": stats.prefill_seconds,
            "eval": stats.decode_seconds,
        }
        yield self._piece() | {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "prompt_eval_count": self._stream.prompt_tokens,
            "eval_count": stats.output_tokens,
            **{f"{name}_duration": int(value * 1e9) for name, value in seconds.items()},
        }

    def _error(self, error: RequestError) -> Event:
        return error.ollama()

    def ping(self) -> Event:
        """A line without text."""
        return self._piece()

    def _add(self, event: Event) -> None:
        grow(self.result, event)

    def frame(self, event: Event) -> bytes:
        """An event as the stream has it."""
        return to_json(event) + b"\n"

    def _piece(self, text: str = "", parts: Sequence[Part] = ()) -> Event:
        return {**_head(self.model), **_content(self._body, text, parts), "done": False}


def _content(body: OllamaBody, text: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
    """A piece of the answer, in the fields of the response."""
    thinking = joined(parts, Reasoning)
    thought = {"thinking": thinking} if thinking else {}
    if isinstance(body, OllamaGenerateBody):
        return {"response": text, **thought}
    message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
    for call in parts:
        if isinstance(call, ToolCall):
            function = {"name": call.name, "arguments": from_json(call.arguments)}
            message.setdefault("tool_calls", []).append({"id": call.id, "function": function})
    return {"message": message}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
