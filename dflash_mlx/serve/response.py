"""Answers in the formats of the APIs: events that are sent one by one, or combined."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final

from ..answers.parts import Part, ToolCall
from .http_errors import RequestError, new_id
from .sse import DONE, frame
from .steps import ResponseStream, StepOutput

Event = dict[str, Any]
_REPLACED: Final = ("created_at", "model", "role")  # texts that a delta replaces, not extends


class ApiResponse(ABC):
    """The response to one request, as events. A complete response combines all events.

    Args:
        stream: the answers.

    Attributes:
        ends: the last steps of the finished answers.
        model: the name of the model that answers.
        result: the events that have been combined so far.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: ResponseStream) -> None:
        self.ends: list[StepOutput] = []
        self.model = stream.request.model
        self.result: dict[str, Any] = {}
        self._stream = stream
        self._created = int(time.time())

    async def complete(self) -> dict[str, Any]:
        """Return the complete response. Raises `RequestError`."""
        async for events in self._events():
            for event in events:
                self._add(event)
        return self.result

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of each decode step. An error is the last event."""
        try:
            async for events in self._events():
                content = b"".join(map(self.frame, events))
                if content:
                    yield content
        except RequestError as error:
            yield self.frame(self._error(error))

    async def _events(self) -> AsyncIterator[Iterator[Event]]:
        """Yield the events of the start, of each step, and of the end. Raises `RequestError`."""
        yield self._begin()
        async for step in self._stream.steps():
            if step.reason is not None:
                self.ends.append(step)
            yield self._step(step)
        yield self._end()

    def _begin(self) -> Iterator[Event]:
        """Yield the events before the first step."""
        return iter(())

    @abstractmethod
    def _step(self, step: StepOutput) -> Iterator[Event]:
        """Yield the events of a decode step."""

    def _end(self) -> Iterator[Event]:
        """Yield the events after the last step."""
        return iter(())

    @abstractmethod
    def ping(self) -> Event:
        """Return an event that changes nothing, and keeps a silent connection open."""

    @abstractmethod
    def _error(self, error: RequestError) -> Event:
        """Return the event that ends a stream with an error."""

    @abstractmethod
    def _add(self, event: Event) -> None:
        """Add an event to `result`."""

    def frame(self, event: Event) -> bytes:
        """Encode an event for the stream."""
        return frame(event, event.get("type"))

    def close(self) -> None:
        """Cancel answers that are not finished."""
        self._stream.close()

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`: tokens of the prompts and of all finished answers."""
        all_stats = [end.event.stats for end in self.ends]
        prompt_tokens = self._stream.prompt_tokens
        output_tokens = sum(stats.output_tokens for stats in all_stats)
        accepted = sum(stats.accepted_tokens for stats in all_stats)
        drafted = sum(stats.drafted_tokens for stats in all_stats)
        cached = min((stats.reused_tokens for stats in all_stats), default=0)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(end.reasoning_tokens for end in self.ends),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def drafting(self) -> dict[str, Any]:
        """Return `x_dflash`: decode steps, acceptance length, rows of the steps, seconds."""
        all_stats = [end.event.stats for end in self.ends]
        widths: dict[str, int] = {}
        for stats in all_stats:
            for rows, steps in sorted(stats.widths.items()):
                widths[str(rows)] = widths.get(str(rows), 0) + steps
        return {
            "rounds": sum(stats.rounds for stats in all_stats),
            "tokens_per_round": [round(stats.acceptance_length, 3) for stats in all_stats],
            "widths": widths,
            "prefill_seconds": round(sum(stats.prefill_seconds for stats in all_stats), 4),
            "decode_seconds": round(sum(stats.decode_seconds for stats in all_stats), 4),
        }


class ChoicesResponse(ApiResponse):
    """A response of OpenAI's chat completions or completions, whose answers are `choices`.

    Args:
        stream: the answers.
        include_usage: whether the last event of a stream has the usage.
    """

    _prefix: str  # of the response's id
    _kind: str  # the `object` of a complete response
    _chunk_kind: str  # the `object` of an event

    def __init__(self, stream: ResponseStream, include_usage: bool) -> None:
        super().__init__(stream)
        self._include_usage = include_usage
        # The fields that all events share.
        self._head: Event = {
            "id": new_id(self._prefix),
            "object": self._chunk_kind,
            "created": self._created,
            "model": self.model,
        }
        self.result = self._head | {"object": self._kind, "choices": []}

    @abstractmethod
    def _delta(self, index: int) -> dict[str, Any]:
        """Return a choice that adds nothing to an answer."""

    def ping(self) -> Event:
        """Return an event without text, for the answer that is not finished."""
        return self._chunk(self._delta(min(len(self.ends), self._stream.size - 1)))

    def _end(self) -> Iterator[Event]:
        """Yield an event without choices that has the totals."""
        yield self._head | {"choices": [], "usage": self.usage(), "x_dflash": self.drafting()}

    def _error(self, error: RequestError) -> Event:
        return error.openai()

    def _add(self, event: Event) -> None:
        choices = self.result["choices"]
        for choice in event["choices"]:
            if choice["index"] == len(choices):
                choices.append({})
            grow(choices[choice["index"]], choice)
        if not event["choices"]:
            self.result |= {name: event[name] for name in ("usage", "x_dflash")}

    def frame(self, event: Event) -> bytes:
        """Encode an event for the stream. The event with the totals ends the stream."""
        if event.get("choices") == []:
            return (super().frame(event) if self._include_usage else b"") + DONE
        return super().frame({"usage": None} | event if self._include_usage else event)

    def _chunk(self, choice: dict[str, Any], **more: Any) -> Event:
        return self._head | {"choices": [choice]} | more


class ItemsResponse(ApiResponse):
    """A response that is a sequence of items.

    Each item is a call, or combines neighbouring parts of the same kind.
    """

    _kind: type[Part] | None = None  # the kind of the open item

    def _step(self, step: StepOutput) -> Iterator[Event]:
        for part in step.parts:
            if type(part) is not self._kind or isinstance(part, ToolCall):
                yield from self._close_item()
                self._kind = type(part)
                yield from self._open(part)
            yield from self._grow(part)
        if step.reason is not None:
            yield from self._close_item()

    def _close_item(self) -> Iterator[Event]:
        if self._kind is not None:
            yield from self._close()
            self._kind = None

    @abstractmethod
    def _open(self, part: Part) -> Iterator[Event]:
        """Begin an item for this part, without its content."""

    @abstractmethod
    def _grow(self, part: Part) -> Iterator[Event]:
        """Add a part's content to the item."""

    @abstractmethod
    def _close(self) -> Iterator[Event]:
        """End the item."""


def grow(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to an object. Texts, lists and objects grow; other values are replaced."""
    for name, new in delta.items():
        old: Any = whole.get(name)
        if new is None and name in whole:
            continue
        if name in _REPLACED or type(old) not in (dict, list, str):
            whole[name] = new
        elif isinstance(old, dict):
            grow(old, new)
        else:
            whole[name] = old + new


def step_drafting(step: StepOutput) -> dict[str, int]:
    """Return `x_dflash` of an event: the tokens of one decode step."""
    event = step.event
    return {"tokens": len(event.tokens), "accepted": event.accepted, "drafted": event.drafted}
