"""OpenAI's completions: POST /v1/completions, which continues a text without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field

from .body import ListOf
from .fields import MaxTokens
from .openai_common import ChoicesBody
from .request import GenerationRequest
from .response import ChoicesResponse, Event, step_drafting
from .steps import ResponseStream, StepOutput

MAX_PROMPTS, MAX_TOP_LOGPROBS = 32, 5
DEFAULT_TOKENS = 16  # OpenAI's

TokenIds = Annotated[ListOf[int], Field(min_length=1)]
Texts = Annotated[ListOf[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenIdLists = Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionsBody(ChoicesBody):
    """POST /v1/completions"""

    unsupported = {
        **ChoicesBody.unsupported,
        **{"echo": False, "best_of": 1, "suffix": "", "tools": None},
    }

    prompt: str | Texts | TokenIds | TokenIdLists
    max_tokens: MaxTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

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


class CompletionsResponse(ChoicesResponse):
    """The response to all prompts of a request."""

    _prefix, _kind, _chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, stream: ResponseStream, include_usage: bool) -> None:
        super().__init__(stream, include_usage)
        self._lengths = [0] * stream.size  # of the texts so far

    def _step(self, step: StepOutput) -> Iterator[Event]:
        """One event, with the text as the model wrote it."""
        choice = self._delta(step.choice) | {"text": step.event.text, "finish_reason": step.reason}
        choice["logprobs"] = self._logprobs(step)
        yield self._chunk(choice, x_dflash=step_drafting(step))

    def _delta(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _logprobs(self, step: StepOutput) -> dict[str, Any] | None:
        """The log-probabilities of the next tokens of an answer, as parallel lists."""
        if step.logprobs is None:
            return None
        texts, start = [one["token"] for one in step.logprobs], self._lengths[step.choice]
        *offsets, self._lengths[step.choice] = accumulate(map(len, texts), initial=start)
        return {
            "tokens": texts,
            "token_logprobs": [one["logprob"] for one in step.logprobs],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in one["top_logprobs"]}
                for one in step.logprobs
            ],
            "text_offset": offsets,
        }
