"""The dialect of OpenAI's completions: text that is continued, without a template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from .answering import Answering, End, Step
from .ask import Ask
from .chat import Sampled, StreamOptions
from .errors import Refusal
from .fields import Ignored, Only, Refused, Several
from .logprobs import TokenLogprob
from .openai_forms import drafting, new_id, of_round, usage
from .parts import Text
from .sse import Chunks, Frames, frame

MOST_PROMPTS, MOST_TOP = 32, 5
DEFAULT_TOKENS = 16  # of OpenAI's
DONE = b"data: [DONE]\n\n"

Ids = Annotated[Several[int], Field(min_length=1)]
Texts = Annotated[Several[str], Field(min_length=1)]
Lists = Annotated[Several[Ids], Field(min_length=1)]


class CompletionsBody(Sampled):
    """POST /v1/completions"""

    prompt: Annotated[
        str | Texts | Ids | Lists, Field(json_schema_extra={"maxItems": MOST_PROMPTS})
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    stream_options: StreamOptions | None = None
    best_of: Annotated[int | None, Only(1)] = None
    suffix: Annotated[str | None, Only("")] = None
    response_format: Refused = None
    tools: Refused = None
    prompt_cache_key: Ignored = None

    def asks(self) -> list[Ask]:
        """A request for each prompt. Raises `Refusal`."""
        if self.echo and self.logprobs is not None:
            raise Refusal("echo goes without logprobs: the prompt has none.", param="echo")
        prompts = self._prompts()
        if len(prompts) > MOST_PROMPTS:
            told = (
                f"{len(prompts)} prompts, and a request has at most {MOST_PROMPTS}: send several."
            )
            raise Refusal(told, param="prompt")
        most = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        settings = self.settings(most)
        return [
            Ask(
                self.model,
                prompt,
                settings,
                n=self.n or 1,
                top_logprobs=self.logprobs,
                origin="prompt",
            )
            for prompt in prompts
        ]

    def _prompts(self) -> Sequence[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt


class Answers:
    """The answers to all prompts of a request, one prompt after the other.

    Args:
        body: what was asked.
        answering: of each prompt.
        prompts: their texts, for echo.
    """

    def __init__(
        self, body: CompletionsBody, answering: Sequence[Answering], prompts: Sequence[str]
    ) -> None:
        self._body, self._answering, self._prompts = body, answering, prompts
        self._each = body.n or 1
        self._ends: list[End] = []
        self._offsets = [len(self._echo(one)) for one in range(len(answering) * self._each)]

    def leave(self) -> None:
        """Nobody waits for the rest."""
        for one in self._answering:
            one.leave()

    async def whole(self) -> dict[str, Any]:
        """The answer at once. Raises `Refusal`."""
        count = len(self._answering) * self._each
        texts = [self._echo(index) for index in range(count)]
        told: list[list[TokenLogprob]] = [[] for _ in range(count)]
        async for index, step in self._steps():
            texts[index] += _text(step)
            told[index] += step.logprobs or ()
        choices = [
            {
                "index": index,
                "text": texts[index],
                "logprobs": self._logprobs(index, told[index]),
                "finish_reason": self._ends[index].reason,
            }
            for index in range(count)
        ]
        return {**self._head(), "choices": choices, **self._totals()}

    async def stream(self) -> Frames:
        """The answer as frames; an error is the last of them."""
        head = self._head()
        include = bool(self._body.stream_options and self._body.stream_options.include_usage)
        chunks = Chunks(head | {"usage": None} if include else head)
        if self._body.echo:
            for index in range(len(self._answering) * self._each):
                yield chunks.frame({"choices": [_choice(index, self._echo(index))]})
        try:
            async for index, step in self._steps():
                choice = _choice(index, _text(step))
                choice["logprobs"] = self._logprobs(index, step.logprobs or [])
                choice["finish_reason"] = step.end.reason if step.end else None
                yield chunks.frame({"choices": [choice], "x_dflash": of_round(step)})
        except Refusal as refusal:
            yield frame(refusal.openai())
            return
        if include:
            yield frame(head | {"choices": [], **self._totals()})
        yield DONE

    async def _steps(self) -> AsyncIterator[tuple[int, Step]]:
        for place, answering in enumerate(self._answering):
            async for step in answering.steps():
                if step.end is not None:
                    self._ends.append(step.end)
                yield place * self._each + step.choice, step

    def _echo(self, index: int) -> str:
        return self._prompts[index // self._each] if self._body.echo else ""

    def _head(self) -> dict[str, Any]:
        return {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._body.model,
        }

    def _totals(self) -> dict[str, Any]:
        prompt = sum(one.prompt_tokens for one in self._answering)
        return {"usage": usage(prompt, self._ends), "x_dflash": drafting(self._ends)}

    def _logprobs(self, index: int, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The next ones of an answer, in the old form: lists that belong together."""
        if self._body.logprobs is None:
            return None
        offsets = []
        for one in told:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(one.chosen.text)
        return {
            "tokens": [one.chosen.text for one in told],
            "token_logprobs": [one.chosen.logprob for one in told],
            "top_logprobs": [{best.text: best.logprob for best in one.top} for one in told],
            "text_offset": offsets,
        }


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _text(step: Step) -> str:
    return "".join(part.text for part in step.parts if isinstance(part, Text))
