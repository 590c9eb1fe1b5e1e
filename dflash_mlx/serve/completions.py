"""OpenAI's completions: POST /v1/completions, which continues a text without a chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from .body import ListOf
from .fields import MaxTokens
from .generation_request import GenerationRequest
from .openai_common import ChoicesBody
from .response import ChoicesResponse, Event, step_drafting
from .steps import ResponseStream, StepOutput

MAX_PROMPTS = 32
MAX_TOP_LOGPROBS = 5
DEFAULT_TOKENS = 16  # the default of OpenAI's API

TokenIds = Annotated[ListOf[int], Field(min_length=1)]
Texts = Annotated[ListOf[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenIdLists = Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionsBody(ChoicesBody):
    """POST /v1/completions"""

    unsupported = {
        **ChoicesBody.unsupported,
        "echo": False,
        "best_of": 1,
        "suffix": "",
        "tools": None,
    }

    prompt: str | Texts | TokenIds | TokenIdLists
    max_tokens: MaxTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def generation_requests(self) -> list[GenerationRequest]:
        """Convert to an internal request for each prompt. Raises `RequestError`."""
        prompts: Sequence[Any] = self.prompt
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            prompts = [self.prompt]
        max_tokens = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        return [
            GenerationRequest(
                model=self.model,
                prompt=prompt,
                settings=self.settings(max_tokens),
                schema=self.answer_schema(),
                n=self.n or 1,
                top_logprobs=self.logprobs,
                prompt_field="prompt",
            )
            for prompt in prompts
        ]


class CompletionsResponse(ChoicesResponse):
    """The response to all prompts of a request."""

    _prefix = "cmpl-"
    _kind = "text_completion"
    _chunk_kind = "text_completion"

    def __init__(self, stream: ResponseStream, include_usage: bool) -> None:
        super().__init__(stream, include_usage)
        self._lengths = [0] * stream.size  # characters of each answer so far

    def _step(self, step: StepOutput) -> Iterator[Event]:
        """Yield one event, with the text as the model wrote it."""
        choice = {
            "index": step.choice,
            "text": step.event.text,
            "logprobs": self._logprobs(step),
            "finish_reason": step.reason,
        }
        yield self._chunk(choice, x_dflash=step_drafting(step))

    def _delta(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _logprobs(self, step: StepOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of a step's tokens as parallel lists."""
        if step.logprobs is None:
            return None
        tokens = []
        logprobs = []
        top_logprobs = []
        offsets = []
        for token in step.logprobs:
            tokens.append(token["token"])
            logprobs.append(token["logprob"])
            top_logprobs.append({top["token"]: top["logprob"] for top in token["top_logprobs"]})
            offsets.append(self._lengths[step.choice])
            self._lengths[step.choice] += len(token["token"])
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
