"""A chat with a server: the conversation is here, and every turn sends all of it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from dflash_mlx.bench.server import ServerClient, text_of
from dflash_mlx.errors import PromptError, ServerError, SettingsError
from dflash_mlx.events import Event, FinishReason, Stats

from .chat_dialogue import Answer, Dialogue, Messages

TAGS: Final = ("<think>", "</think>")  # around reasoning, which comes apart from the text
INSTANT: Final = 1e-4  # seconds a round, in which no model writes any
TOO_LONG: Final = "context_length_exceeded"
# What other servers of OpenAI's dialect know; ours is told the rest where it is set.
EVERYWHERE: Final = ("temperature", "top_p", "seed", "max_tokens", "stop")


@dataclass(frozen=True)
class Remote:
    """What stands for a pair that is elsewhere."""

    server: ServerClient
    drafter: None = None
    chains: None = None

    @property
    def title(self) -> str:
        """The model, and where it is."""
        return f"{self.server.model} · {self.server.url}"

    def limit_reached(self, stats: Stats) -> str:
        """Which limit ended a text of finish reason "length"."""
        return "cut off by --max-tokens, or the context is full"


class Served(Dialogue):
    """Messages and the answers of a server.

    Args:
        server: which, and its model.
        settings: as `Dialogue`'s.
    """

    def __init__(self, server: ServerClient, settings: dict[str, Any]) -> None:
        self.pair: Any = Remote(server)
        self.settings = settings
        self._begin_empty()

    @property
    def name(self) -> str:
        """The model's."""
        return str(self.pair.server.model)

    @property
    def vocabulary(self) -> None:
        """The server knows it."""
        return None

    def _encoded(self, messages: Messages) -> list[int]:
        """The server does that."""
        return []

    def held(self, answer: Answer) -> int:
        """Nothing is known of it here."""
        return 0

    def thinking(self, answer: Answer) -> tuple[tuple[str, str] | None, bool]:
        """What is put around reasoning."""
        return TAGS, False

    compares = False

    def compare(self, answer: Answer) -> NoReturn:
        """Raises `SettingsError`."""
        raise SettingsError("/compare is for a model in this process, not for a server's.")

    def stream(self, answer: Answer) -> Generator[Event]:
        """Have the server answer; what it said is remembered as far as it came.

        Raises `PromptError` when the conversation is too long for it, and `ServerError`.
        """
        self.answers.append(answer)
        self.last = answer
        said: list[str] = []  # without its reasoning, which is no part of the next question
        try:
            yield from self._events(answer, said)
        except ServerError as error:
            if TOO_LONG in str(error):
                raise PromptError("The conversation is too long for the server's model.") from error
            raise
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})

    def _events(self, answer: Answer, said: list[str]) -> Generator[Event]:
        stats, thinks, reason = Stats(seed=self.settings["seed"]), False, None
        start = last = time.perf_counter()
        unsaid: tuple[Any, ...] = (None, (), [])
        given = {key: v for key in EVERYWHERE if (v := self.settings[key]) not in unsaid}
        further = {"top_k": self.settings["top_k"], "min_p": self.settings["min_p"]}
        given |= {key: value for key, value in further.items() if value}
        with closing(self.pair.server.chunks(self.messages, **given)) as parts:
            for part in parts:
                for choice in part.get("choices") or ():
                    delta = choice.get("delta") or {}
                    reason = choice.get("finish_reason") or reason
                    if not (text := text_of(delta)):
                        continue
                    now, content = time.perf_counter(), delta.get("content") or ""
                    _count(stats, part.get("x_dflash") or {}, now - last, now - start)
                    last = now
                    said.append(content)
                    begins, ends = not content and not thinks, bool(content) and thinks
                    thinks = not content
                    text = f"{TAGS[0] * begins}{TAGS[1] * ends}{text}"
                    answer.events.append(Event(text, [], 0, 0, None, stats))
                    yield answer.events[-1]
                _take(stats, part.get("usage") or {})
        if stats.decode_seconds < INSTANT * stats.rounds:
            stats.decode_seconds = 0.0  # it came in one piece: nobody knows how fast it was written
        end: FinishReason = "length" if reason == "length" else "stop"
        answer.events.append(Event("", [], 0, 0, end, stats))
        yield answer.events[-1]


def _count(stats: Stats, told: dict[str, int], seconds: float, since: float) -> None:
    """Take in a piece of text, and what a server of ours tells of its round."""
    if not stats.first_token_seconds:
        stats.prefill_seconds = stats.first_token_seconds = since
        stats.output_tokens = told.get("tokens", 1)
        return
    stats.count_round(told.get("drafted", 0), told.get("accepted", 0), told.get("tokens", 1))
    stats.decode_seconds += seconds


def _take(stats: Stats, usage: dict[str, Any]) -> None:
    """Take in the server's own count."""
    details = usage.get("prompt_tokens_details") or {}
    stats.prompt_tokens = usage.get("prompt_tokens", stats.prompt_tokens)
    stats.reused_tokens = details.get("cached_tokens") or stats.reused_tokens
    stats.output_tokens = usage.get("completion_tokens", stats.output_tokens)
