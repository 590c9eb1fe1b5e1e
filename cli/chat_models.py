"""What a chat talks to: a model in this process, or one behind a server."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import dflash_mlx
from dflash_mlx.errors import PromptError, ServerError
from dflash_mlx.events import Stats
from dflash_mlx.settings import SETTINGS

from .pair import Pair, template_variables, without_template
from .thoughts import Thoughts

Messages = list[dict[str, str]]
TOO_LONG = "context_length_exceeded"
ALWAYS = ("temperature", "top_p", "max_tokens")  # every server knows these, with other defaults


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer."""

    parts: list[tuple[str, bool]]  # text to show, and whether it is reasoning
    content: str  # text that belongs in the conversation
    stats: Stats  # the request's counters so far
    finish_reason: str | None = None  # "stop" or "length" at the end of the answer
    thoughts: Thoughts | None = None  # counted so far; None for a model behind a server


class LocalModel:
    """A model in this process. Its caches stay from turn to turn.

    Args:
        pair: the model and its drafter.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair: Pair | None = pair
        self.name, self.title = pair.target.name, pair.title
        self._pair = pair
        self._caches = dflash_mlx.Conversation(pair.target, pair.drafter, pair.kv_bits)

    def stream(self, messages: Messages, settings: dict[str, Any]) -> Generator[AnswerPiece]:
        """Answer a conversation, piece by piece. Raises `PromptError` if it is too long."""
        from dflash_mlx.prompt import encode_prompt

        target, drafter = self._pair.target, self._pair.drafter
        ids = encode_prompt(target, messages, template_variables(target, settings))
        thoughts = Thoughts(target, ids)
        settings |= {"policy": self._pair.policy, "conversation": self._caches}
        for event in dflash_mlx.stream_generate(target, drafter, ids, **without_template(settings)):
            shown = thoughts.split(event)
            content = "".join(text for text, is_thought in shown if not is_thought)
            yield AnswerPiece(shown, content, event.stats, event.finish_reason, thoughts)


class ServedModel:
    """A model behind a server that speaks OpenAI's API. Every turn sends the whole conversation.

    Args:
        url: of the server.
        model: its name there; None takes the first one that the server offers.
        key: the API key, if the server wants one.

    Raises `ServerError`.
    """

    pair: Pair | None = None

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        from dflash_mlx.bench.server import ServerClient

        self._server = ServerClient.find(url, model, key)
        self.name = self._server.model
        self.title = f"{self.name} · {self._server.url}"

    def stream(self, messages: Messages, settings: dict[str, Any]) -> Generator[AnswerPiece]:
        """As `LocalModel.stream`. Raises `ServerError`, too."""
        given = {
            "enable_thinking" if name == "think" else name: value
            for name, value in settings.items()
            if name in ALWAYS or value not in (SETTINGS[name].default, (), [])
        }
        stats, reason = Stats(seed=settings["seed"]), None
        start = time.perf_counter()
        try:
            with closing(self._server.chunks(messages, **given)) as chunks:
                for chunk in chunks:
                    _count_usage(stats, chunk.get("usage") or {})
                    for choice in chunk.get("choices") or ():
                        delta, now = choice.get("delta") or {}, time.perf_counter() - start
                        reason = choice.get("finish_reason") or reason
                        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                        content = delta.get("content") or ""
                        if reasoning or content:
                            stats.first_token_seconds = stats.first_token_seconds or now
                            stats.decode_seconds = now - stats.first_token_seconds
                            parts = [(reasoning, True), (content, False)]
                            yield AnswerPiece(parts, content, stats)
        except ServerError as error:
            if TOO_LONG in str(error):
                raise PromptError("The conversation is too long for the server's model.") from error
            raise
        yield AnswerPiece([], "", stats, reason or "stop")


def _count_usage(stats: Stats, usage: dict[str, Any]) -> None:
    """Take over the server's own token counts."""
    details = usage.get("prompt_tokens_details") or {}
    stats.prompt_tokens = usage.get("prompt_tokens", stats.prompt_tokens)
    stats.reused_tokens = details.get("cached_tokens") or stats.reused_tokens
    stats.output_tokens = usage.get("completion_tokens", stats.output_tokens)


ChatModel = LocalModel | ServedModel
