"""Answers in the formats of the APIs: events, which are sent one by one or put together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final

from ..answers.parser import Part, ToolCall
from .errors import RequestError, new_id
from .sse import DONE, frame
from .steps import ResponseStream, StepOutput

Event = dict[str, Any]
_FIXED: Final = ("created_at", "model", "role")  # texts that do not grow


class ApiResponse(ABC):
    """The response to one request: its events. A whole response is their sum.

    Args:
        stream: the answers.

    Attributes:
        ends: the last steps of the finished answers.
        result: the whole response, as far as its events are added up.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: ResponseStream) -> None:
        self._stream, self.ends = stream, list[StepOutput]()
        self.model, self._created = stream.request.model, int(time.time())
        self.result: dict[str, Any] = {}

    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""
        async for events in self._events():
            for event in events:
                self._add(event)
        return self.result

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream, one item per decode step; an error is the last one."""
        try:
            async for events in self._events():
                if content := b"".join(map(self.frame, events)):
                    yield content
        except RequestError as error:
            yield self.frame(self._error(error))

    async def _events(self) -> AsyncIterator[Iterator[Event]]:
        """The events of the start, of each step, and of the end. Raises `RequestError`."""
        yield self._begin()
        async for step in self._stream.steps():
            if step.reason is not None:
                self.ends.append(step)
            yield self._step(step)
        yield self._end()

    def _begin(self) -> Iterator[Event]:
        """The events before the first step."""
        return iter(())

    @abstractmethod
    def _step(self, step: StepOutput) -> Iterator[Event]:
        """The events of a decode step."""

    def _end(self) -> Iterator[Event]:
        """The events after the last step."""
        return iter(())

    @abstractmethod
    def ping(self) -> Event:
        """What changes nothing, and keeps a silent connection open."""

    @abstractmethod
    def _error(self, error: RequestError) -> Event:
        """The event that ends a stream with an error."""

    @abstractmethod
    def _add(self, event: Event) -> None:
        """Add an event to the whole response."""

    def frame(self, event: Event) -> bytes:
        """An event as the stream has it."""
        return frame(event, event.get("type"))

    def close(self) -> None:
        """Cancel what is not finished."""
        self._stream.close()

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`: tokens of the prompts and of all finished answers."""
        stats, prompt = [one.event.stats for one in self.ends], self._stream.prompt_tokens
        output = sum(one.output_tokens for one in stats)
        accepted = sum(one.accepted_tokens for one in stats)
        drafted = sum(one.drafted_tokens for one in stats)
        cached = min((one.reused_tokens for one in stats), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(one.reasoning_tokens for one in self.ends),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def drafting(self) -> dict[str, Any]:
        """`x_dflash`: decode steps, acceptance length, rows of the steps, seconds."""
        stats = [one.event.stats for one in self.ends]
        widths: dict[str, int] = {}
        for one in stats:
            for rows, steps in sorted(one.widths.items()):
                widths[str(rows)] = widths.get(str(rows), 0) + steps
        return {
            "rounds": sum(one.rounds for one in stats),
            "tokens_per_round": [round(one.acceptance_length, 3) for one in stats],
            "widths": widths,
            "prefill_seconds": round(sum(one.prefill_seconds for one in stats), 4),
            "decode_seconds": round(sum(one.decode_seconds for one in stats), 4),
        }


class ChoicesResponse(ApiResponse):
    """A response of OpenAI's chat completions or completions: answers are `choices`.

    Args:
        stream: the answers.
        include_usage: whether the last event of a stream has the usage.
    """

    _prefix: str  # of the id
    _kind: str  # the `object`
    _chunk_kind: str  # of an event

    def __init__(self, stream: ResponseStream, include_usage: bool) -> None:
        super().__init__(stream)
        self._include_usage = include_usage
        self._head: Event = {"id": new_id(self._prefix), "object": self._chunk_kind}
        self._head |= {"created": self._created, "model": self.model}
        self.result = self._head | {"object": self._kind, "choices": []}

    @abstractmethod
    def _delta(self, index: int) -> dict[str, Any]:
        """What adds nothing to an answer."""

    def ping(self) -> Event:
        """An event without text, of the answer that is not finished."""
        return self._chunk(self._delta(min(len(self.ends), self._stream.size - 1)))

    def _end(self) -> Iterator[Event]:
        """The totals."""
        yield self._head | {"choices": [], "usage": self.usage(), "x_dflash": self.drafting()}

    def _error(self, error: RequestError) -> Event:
        """The error as without a stream."""
        return error.openai()

    def _add(self, event: Event) -> None:
        """Add an event to its choice."""
        choices = self.result["choices"]
        for choice in event["choices"]:
            if choice["index"] == len(choices):
                choices.append({})
            grow(choices[choice["index"]], choice)
        if not event["choices"]:
            self.result |= {name: event[name] for name in ("usage", "x_dflash")}

    def frame(self, event: Event) -> bytes:
        """An event as the stream has it; the totals are its end."""
        if event.get("choices") == []:
            return (super().frame(event) if self._include_usage else b"") + DONE
        return super().frame({"usage": None} | event if self._include_usage else event)

    def _chunk(self, choice: dict[str, Any], **more: Any) -> Event:
        return self._head | {"choices": [choice]} | more


class ItemsResponse(ApiResponse):
    """A response of items, one after the other: neighbouring parts of a kind, or a call."""

    _kind: type[Part] | None = None  # of the open item

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
        """Begin an item with this part, without its content."""

    @abstractmethod
    def _grow(self, part: Part) -> Iterator[Event]:
        """Add a part's content to the item."""

    @abstractmethod
    def _close(self) -> Iterator[Event]:
        """End the item."""


def grow(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to what came before: texts, lists and objects grow, other values replace it."""
    for name, new in delta.items():
        old: Any = whole.get(name)
        if new is None and name in whole:
            continue
        if name in _FIXED or type(old) not in (dict, list, str):
            whole[name] = new
        elif isinstance(old, dict):
            grow(old, new)
        else:
            whole[name] = old + new


def step_drafting(step: StepOutput) -> dict[str, int]:
    """`x_dflash` of an event: the tokens of one decode step."""
    event = step.event
    return {"tokens": len(event.tokens), "accepted": event.accepted, "drafted": event.drafted}
