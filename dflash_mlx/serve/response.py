"""What the responses of all APIs share: whole or as a stream, and what they count."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from .errors import RequestError, new_id
from .handler import ResponseStream
from .logprobs import TokenLogprob, TokenProbability
from .sse import DONE, frame
from .steps import Finish, StepOutput


class ApiResponse(ABC):
    """The response to one request, in the format of an API.

    Args:
        streams: the answers, of one prompt after the other.

    Attributes:
        finishes: how the finished answers ended.
    """

    media_type = "text/event-stream"

    def __init__(self, streams: Sequence[ResponseStream]) -> None:
        self._streams, self.finishes = streams, list[Finish]()
        self.model, self._created = streams[0].request.model, int(time.time())
        self.prompt_tokens = sum(stream.prompt_tokens for stream in streams)
        self.choices = sum(stream.request.n for stream in streams)

    @abstractmethod
    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""

    @abstractmethod
    def ping(self) -> bytes:
        """What changes nothing, and keeps a silent connection open."""

    @abstractmethod
    def _frames(self) -> AsyncIterator[bytes]: ...

    @abstractmethod
    def _error_frame(self, error: RequestError) -> bytes: ...

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream, one item per decode step; an error is the last one."""
        try:
            async for content in self._frames():
                if content:
                    yield content
        except RequestError as error:
            yield self._error_frame(error)

    async def steps(self) -> AsyncIterator[StepOutput]:
        """The steps of all answers, with indices over all prompts. Raises `RequestError`."""
        first = 0
        for stream in self._streams:
            async for step in stream.steps():
                if step.finish is not None:
                    self.finishes.append(step.finish)
                yield replace(step, choice=first + step.choice)
            first += stream.request.n

    async def answers(self) -> list[StepOutput]:
        """The whole answers, each as if it came in one step. Raises `RequestError`."""
        found: list[list[StepOutput]] = [[] for _ in range(self.choices)]
        async for step in self.steps():
            found[step.choice].append(step)
        return list(map(StepOutput.merged, found))

    def close(self) -> None:
        """Cancel what is not finished."""
        for stream in self._streams:
            stream.close()

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage`: tokens of the prompts and of all finished answers."""
        stats = [finish.stats for finish in self.finishes]
        output = sum(one.output_tokens for one in stats)
        accepted = sum(one.accepted_tokens for one in stats)
        drafted = sum(one.drafted_tokens for one in stats)
        cached = min((one.reused_tokens for one in stats), default=0)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(finish.reasoning_tokens for finish in self.finishes),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def drafting(self) -> dict[str, Any]:
        """`x_dflash`: decode steps, acceptance length, rows of the steps, seconds."""
        stats = [finish.stats for finish in self.finishes]
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
        streams: the answers, of one prompt after the other.
        include_usage: whether the last chunk of a stream has the usage.
    """

    _prefix: str  # of the id
    _kind: str  # the `object`
    _chunk_kind: str  # of a chunk

    def __init__(self, streams: Sequence[ResponseStream], include_usage: bool | None) -> None:
        super().__init__(streams)
        self._include_usage = include_usage
        self._head: dict[str, Any] = {"id": new_id(self._prefix), "object": self._chunk_kind}
        self._head |= {"created": self._created, "model": self.model}

    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""
        choices = [self._choice(answer) for answer in await self.answers()]
        return self._head | {"object": self._kind, "choices": choices} | self._totals()

    def ping(self) -> bytes:
        """A chunk without text, of the answer that is not finished."""
        return self._chunk(self._delta(min(len(self.finishes), self.choices - 1)))

    @abstractmethod
    def _choice(self, answer: StepOutput) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def _chunks(self, step: StepOutput) -> Iterator[bytes]: ...

    async def _frames(self) -> AsyncIterator[bytes]:
        async for step in self.steps():
            yield b"".join(self._chunks(step))
        totals = frame(self._head | {"choices": []} | self._totals())
        yield totals + DONE if self._include_usage else DONE

    def _error_frame(self, error: RequestError) -> bytes:
        return frame(error.openai())

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        content = self._head | {"choices": [choice]} | more
        return frame({"usage": None} | content if self._include_usage else content)

    def _totals(self) -> dict[str, Any]:
        return {"usage": self.usage(), "x_dflash": self.drafting()}


def step_drafting(step: StepOutput) -> dict[str, int]:
    """`x_dflash` of a chunk: the tokens of one decode step."""
    event = step.event
    return {"tokens": len(event.tokens), "accepted": event.accepted, "drafted": event.drafted}


def format_logprob(token: TokenLogprob) -> dict[str, Any]:
    """A token's log-probability, and those of its likeliest alternatives."""
    alternatives = [_format_probability(other) for other in token.top]
    return {**_format_probability(token.chosen), "top_logprobs": alternatives}


def _format_probability(token: TokenProbability) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": token.bytes}
