"""What a chat talks to: a model in this process, or one behind a server."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import dflash_mlx
from dflash_mlx.errors import PromptError, ServerError
from dflash_mlx.events import Stats

from .pair import Pair

Messages = list[dict[str, str]]
TOO_LONG = "context_length_exceeded"
STANDARD = ("temperature", "top_p", "seed", "max_tokens", "stop")  # every server knows these


@dataclass(frozen=True)
class Piece:
    """A piece of an answer."""

    parts: list[tuple[str, bool]]  # text to show, and whether it is reasoning
    content: str  # text that belongs in the conversation
    stats: Stats  # the request's counters so far
    finish_reason: str | None = None  # "stop" or "length" at the end of the answer


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

    def stream(self, messages: Messages, settings: dict[str, Any]) -> Generator[Piece]:
        """Answer a conversation, piece by piece. Raises `PromptError` if it is too long."""
        from dflash_mlx.prompt import encode_prompt

        target = self._pair.target
        ids = encode_prompt(target, messages)
        splitter = _splitter(target.tokenizer, ids)
        decoding = self._pair.settings | settings
        for event in dflash_mlx.stream_generate(
            target, self._pair.drafter, ids, conversation=self._caches, **decoding
        ):
            yield Piece(splitter.split(event.text), event.text, event.stats, event.finish_reason)


def _splitter(tokenizer: Any, ids: list[int]) -> ReasoningSplitter:
    if not getattr(tokenizer, "has_thinking", False):
        return ReasoningSplitter(None)
    tags = tokenizer.think_start, tokenizer.think_end
    return ReasoningSplitter(tags, tokenizer.decode(ids[-8:]).rstrip().endswith(tags[0]))


class ReasoningSplitter:
    """Separates reasoning from the answer in streamed text; a tag is never in two pieces of it.

    Args:
        tags: what begins and ends reasoning; None for a model that does not reason.
        inside: whether the text begins within reasoning, because the prompt opened it.
    """

    def __init__(self, tags: tuple[str, str] | None, inside: bool = False) -> None:
        self._tags, self._inside = tags, inside

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a piece, and whether each is reasoning. Tags belong to the reasoning."""
        if self._tags is None:
            return [(text, False)]
        begin, end = self._tags
        parts = []
        for part in re.split(f"({re.escape(begin)}|{re.escape(end)})", text):
            self._inside |= part == begin
            parts.append((part, self._inside))
            self._inside &= part != end
        return parts


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

    def stream(self, messages: Messages, settings: dict[str, Any]) -> Generator[Piece]:
        """As `LocalModel.stream`. Raises `ServerError`, too."""
        given = {name: settings[name] for name in STANDARD if settings[name] not in (None, (), [])}
        given |= {name: settings[name] for name in ("top_k", "min_p") if settings[name]}
        stats, reason, reasoned = Stats(seed=settings["seed"]), None, False
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
                            border = "\n" if content and reasoned else ""
                            reasoned = not content
                            stats.first_token_seconds = stats.first_token_seconds or now
                            stats.decode_seconds = now - stats.first_token_seconds
                            parts = [(reasoning, True), (border + content, False)]
                            yield Piece(parts, content, stats)
        except ServerError as error:
            if TOO_LONG in str(error):
                raise PromptError("The conversation is too long for the server's model.") from error
            raise
        yield Piece([], "", stats, reason or "stop")


def _count_usage(stats: Stats, usage: dict[str, Any]) -> None:
    """Take over the server's own token counts."""
    details = usage.get("prompt_tokens_details") or {}
    stats.prompt_tokens = usage.get("prompt_tokens", stats.prompt_tokens)
    stats.reused_tokens = details.get("cached_tokens") or stats.reused_tokens
    stats.output_tokens = usage.get("completion_tokens", stats.output_tokens)


ChatModel = LocalModel | ServedModel
