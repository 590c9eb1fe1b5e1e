"""OpenAI's completions: POST /v1/completions, which continues a text without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field

from .body import ListOf
from .openai_common import MaxTokens, SamplingBody
from .request import GenerationRequest
from .response import ChoicesResponse, step_drafting
from .steps import StepOutput

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


class CompletionsResponse(ChoicesResponse):
    """The response to all prompts of a request."""

    _prefix, _kind, _chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lengths = [0] * self.choices  # of the texts so far

    def _choice(self, answer: StepOutput) -> dict[str, Any]:
        return self._delta(answer.choice) | {
            "text": answer.raw,
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.reason,
        }

    def _chunks(self, step: StepOutput) -> Iterator[bytes]:
        yield self._chunk(self._choice(step), x_dflash=step_drafting(step))

    def _delta(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _logprobs(self, step: StepOutput) -> dict[str, Any] | None:
        """The log-probabilities of the next tokens of an answer, as parallel lists."""
        if step.logprobs is None:
            return None
        texts, start = [one.chosen.text for one in step.logprobs], self._lengths[step.choice]
        *offsets, self._lengths[step.choice] = accumulate(map(len, texts), initial=start)
        return {
            "tokens": texts,
            "token_logprobs": [one.chosen.logprob for one in step.logprobs],
            "top_logprobs": [{top.text: top.logprob for top in one.top} for one in step.logprobs],
            "text_offset": offsets,
        }
