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

from .pair import Pair

Messages = list[dict[str, str]]
TOO_LONG = "context_length_exceeded"
STANDARD = ("temperature", "top_p", "seed", "max_tokens", "stop")  # every server knows these


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        parts: text to show, and whether it is reasoning.
        content: text that belongs in the conversation.
        stats: the request's counters so far.
        finish_reason: "stop" or "length" at the end of the answer.
    """

    parts: list[tuple[str, bool]]
    content: str
    stats: Stats
    finish_reason: str | None = None


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
            parts = splitter.split(event.text, last=event.finish_reason is not None)
            yield Piece(parts, event.text, event.stats, event.finish_reason)


def _splitter(tokenizer: Any, ids: list[int]) -> ReasoningSplitter:
    if not getattr(tokenizer, "has_thinking", False):
        return ReasoningSplitter(None)
    tags = tokenizer.think_start, tokenizer.think_end
    return ReasoningSplitter(tags, tokenizer.decode(ids[-8:]).rstrip().endswith(tags[0]))


class ReasoningSplitter:
    """Separates reasoning from the answer in streamed text.

    Args:
        tags: what begins and ends reasoning; None for a model that does not reason.
        inside: whether the text begins within reasoning, because the prompt opened it.
    """

    def __init__(self, tags: tuple[str, str] | None, inside: bool = False) -> None:
        self._tags, self._inside, self._held = tags, inside, ""

    def split(self, text: str, last: bool = False) -> list[tuple[str, bool]]:
        """The next parts and whether each is reasoning; half a tag is held back until `last`."""
        if self._tags is None:
            return [(text, False)]
        parts, rest = [], self._held + text
        while (tag := self._tags[self._inside]) in rest:
            before, _, rest = rest.partition(tag)
            # Tags are shown like the reasoning that they enclose.
            parts += [(before, self._inside), (tag, True)]
            self._inside = not self._inside
        lengths = range(min(len(tag) - 1, len(rest)), 0, -1)
        half = next((n for n in lengths if tag.startswith(rest[-n:])), 0) * (not last)
        border = len(rest) - half
        self._held = rest[border:]
        return [*parts, (rest[:border], self._inside)]


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
