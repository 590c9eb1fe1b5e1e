"""OpenAI's completions: POST /v1/completions, which continues a text without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from .body import ListOf
from .errors import RequestError, new_id
from .handler import Finish, ResponseStream, StepOutput
from .logprobs import TokenLogprob
from .openai_common import (
    MaxTokens,
    SamplingBody,
    StreamOptions,
    drafting,
    step_drafting,
    usage,
)
from .request import GenerationRequest
from .sse import DONE, Frames, frame

MAX_PROMPTS, MAX_TOP_LOGPROBS = 32, 5
DEFAULT_TOKENS = 16  # OpenAI's

TokenIds = Annotated[ListOf[int], Field(min_length=1)]
Texts = Annotated[ListOf[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenIdLists = Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionsBody(SamplingBody):
    """POST /v1/completions"""

    prompt: str | Texts | TokenIds | TokenIdLists
    max_tokens: MaxTokens | None = None
    echo: Literal[False] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    tools: None = None

    def generation_requests(self) -> list[GenerationRequest]:
        """A request for each prompt. Raises `RequestError`."""
        prompts: Sequence[Any] = self.prompt
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            prompts = [self.prompt]
        limit = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        return [
            GenerationRequest(
                self.model,
                prompt,
                self.settings(limit),
                schema=self.answer_schema(),
                n=self.n or 1,
                top_logprobs=self.logprobs,
                prompt_field="prompt",
            )
            for prompt in prompts
        ]


class CompletionsResponse:
    """The response to all prompts of a request, one prompt after the other.

    Args:
        body: the request.
        streams: one for each prompt.
    """

    def __init__(self, body: CompletionsBody, streams: Sequence[ResponseStream]) -> None:
        self._body, self._streams = body, streams
        self._n = body.n or 1
        self._offsets = [0] * len(streams) * self._n  # of the next token's text
        self._finishes: list[Finish] = []
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._streams[0].request.model,
        }

    def close(self) -> None:
        """Cancel what is not finished."""
        for stream in self._streams:
            stream.close()

    async def complete(self) -> dict[str, Any]:
        """The whole response. Raises `RequestError`."""
        texts = [""] * len(self._offsets)
        tokens: list[list[TokenLogprob]] = [[] for _ in texts]
        async for index, step in self._steps():
            texts[index] += step.event.text
            tokens[index] += step.logprobs or ()
        choices = [
            _choice(index, text, self._logprobs(index, tokens[index]), self._finishes[index])
            for index, text in enumerate(texts)
        ]
        return {**self._head, "choices": choices, **self._totals()}

    async def stream_frames(self) -> Frames:
        """The response as a stream; an error is its last frame."""
        head, options = self._head, self._body.stream_options
        include_usage = bool(options and options.include_usage)
        chunk_head = head | {"usage": None} if include_usage else head
        try:
            async for index, step in self._steps():
                logprobs = self._logprobs(index, step.logprobs or [])
                choice = _choice(index, step.event.text, logprobs, step.finish)
                yield frame(chunk_head | {"choices": [choice], "x_dflash": step_drafting(step)})
        except RequestError as error:
            yield frame(error.openai())
            return
        if include_usage:
            yield frame(head | {"choices": [], **self._totals()})
        yield DONE

    def ping(self) -> bytes:
        """A chunk without text, of the answer that is not finished."""
        index = min(len(self._finishes), len(self._offsets) - 1)
        return frame(self._head | {"choices": [_choice(index, "", None, None)]})

    async def _steps(self) -> AsyncIterator[tuple[int, StepOutput]]:
        for place, stream in enumerate(self._streams):
            async for step in stream.steps():
                if step.finish is not None:
                    self._finishes.append(step.finish)
                yield place * self._n + step.choice, step

    def _totals(self) -> dict[str, Any]:
        prompt_tokens = sum(stream.prompt_tokens for stream in self._streams)
        return {"usage": usage(prompt_tokens, self._finishes), "x_dflash": drafting(self._finishes)}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The log-probabilities of the next tokens of an answer, as parallel lists."""
        if self._body.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.chosen.text)
        return {
            "tokens": [token.chosen.text for token in tokens],
            "token_logprobs": [token.chosen.logprob for token in tokens],
            "top_logprobs": [{one.text: one.logprob for one in token.top} for token in tokens],
            "text_offset": offsets,
        }


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish: Finish | None
) -> dict[str, Any]:
    reason = finish.reason if finish else None
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
