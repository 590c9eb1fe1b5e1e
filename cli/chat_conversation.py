"""The conversation of a chat, and what it is with: a model in this process or behind a server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any

import dflash_mlx
from dflash_mlx.errors import DFlashError, PromptError, ServerError
from dflash_mlx.events import Stats
from dflash_mlx.settings import SETTINGS

from .answer import AnswerPiece, Thoughts, Writer
from .options import with_seed
from .output import MIN_STEPS, counted, error_line, note, rate, times, waiting
from .pair import Pair, explain, template_variables, without_template

Messages = list[dict[str, str]]
TOO_LONG = "context_length_exceeded"
ALWAYS = ("temperature", "top_p", "max_tokens")  # every server knows these, with other defaults


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
            yield AnswerPiece(thoughts.split(event), event.stats, event.finish_reason, thoughts)


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
        from dflash_mlx.bench.server_bench import ServerClient

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
        stats, reason = Stats(seed=settings["seed"]), "stop"
        try:
            with closing(self._server.stream(messages, stats, **given)) as pieces:
                for reasoning, text, ended in pieces:
                    reason = ended or reason
                    yield AnswerPiece([(reasoning, True), (text, False)], stats)
        except ServerError as error:
            if TOO_LONG in str(error):
                raise PromptError("The conversation is too long for the server's model.") from error
            raise
        yield AnswerPiece([], stats, reason)


class Chat:
    """A conversation with a model, on a terminal or in a pipe.

    Args:
        model: what answers.
        settings: of `stream_generate`, for the next answers; /set changes them.
        messages: that were said before.
        verbose: whether to explain the draft lengths after each answer.

    Raises `SettingsError` for settings that the model cannot use.

    Attributes:
        interactive: whether a person types; a pipe gets only the answers on stdout.
        leaving: set by /quit.
        stopped: whether Ctrl-C ended the last answer.
    """

    def __init__(
        self,
        model: LocalModel | ServedModel,
        settings: dict[str, Any],
        messages: Messages,
        verbose: bool = False,
    ) -> None:
        self.model, self.messages, self._verbose = model, messages, verbose
        self.settings: dict[str, Any] = {}
        self.change(settings)
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.leaving = self.stopped = self._streams = False

    def ask(self, text: str) -> None:
        """Answer a message."""
        self.answer([*self.messages, {"role": "user", "content": text}])

    def answer(self, messages: Messages) -> None:
        """Answer a conversation and go on from there; after an error all is as it was before.

        Ctrl-C stops the answer and keeps its text. Raises `DFlashError` only in a pipe.
        """
        writer, content, piece = Writer(), "", None
        try:
            pieces = self.model.stream(messages, dict(self.settings))
            with self._ctrl_c_stops(), closing(pieces):
                with waiting("Reading the prompt", spinner=False):  # its thread outlives a Ctrl-C
                    first = [one for one in [next(pieces, None)] if one is not None]
                self._streams = True
                for piece in chain(first, pieces):
                    writer.write(piece.parts)
                    content += piece.content
                    if self.stopped:
                        break
        except DFlashError as error:
            if not self.interactive:
                raise
            writer.end()
            hint = " /clear starts a new conversation." * isinstance(error, PromptError)
            error_line(f"{error}{hint}")
            return
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            self.stopped = True
        writer.end()
        if piece is not None:
            self.messages = [*messages, {"role": "assistant", "content": content}]
            self._report(piece)
        elif self.stopped:
            note("Stopped before the answer; the message is not kept.")

    @contextmanager
    def _ctrl_c_stops(self) -> Iterator[None]:
        """Have a person's Ctrl-C stop an answer between two steps, so that caches stay whole.

        Before the first piece, and the second time, it interrupts at once.
        """

        def stop(*_: object) -> None:
            if self.stopped or not self._streams:
                raise KeyboardInterrupt
            self.stopped = True

        self._streams = self.stopped = False
        before = signal.signal(signal.SIGINT, stop) if self.interactive else None
        try:
            yield
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def change(self, settings: dict[str, Any]) -> None:
        """Change settings for the next answers, or raise `SettingsError` and change none."""
        from dflash_mlx.generation import GenerationSettings

        changed = with_seed(self.settings | settings)
        checked = GenerationSettings(**changed)
        if self.model.pair is not None:
            checked.check_vocabulary(self.model.pair.target.vocab_size)
        self.settings = changed

    def _report(self, piece: AnswerPiece) -> None:
        """A line about an answer: its length, speed and speedup, and what was read for it."""
        stats, pair = piece.stats, self.model.pair
        parts = [counted(stats.output_tokens, "token")]
        if piece.thoughts is not None and piece.thoughts.tokens:
            parts[0] += f" ({piece.thoughts.tokens} in thoughts)"
        if stats.decode_seconds and stats.output_tokens > MIN_STEPS:
            parts.append(f"{rate(stats.tokens_per_second)} tok/s")
        if pair and stats.rounds >= MIN_STEPS and (plain := pair.plain_speed()):
            speedup = times(stats.tokens_per_second / plain, stats.acceptance_length)
            doubtful = " (other programs disturbed the timing)" * speedup.endswith("?")
            parts.append(f"~{speedup} plain{doubtful}")
        if pair and pair.drafter is not None and stats.rounds:
            parts.append(f"{stats.acceptance_length:.1f} tokens per step")
        if self.stopped:
            parts.append("stopped")
        elif piece.finish_reason == "length":
            limit = pair.limit_reached(stats) if pair else "cut off by --max-tokens"
            typed = limit.replace("--max-tokens", "/set max_tokens")
            parts.append(typed if self.interactive else limit)
        new = stats.prompt_tokens - stats.reused_tokens
        note(" · ".join([*parts, f"prompt: {new} new, {stats.reused_tokens} cached"]))
        if pair and self._verbose:
            explain(pair, stats, self.settings["temperature"])

    @property
    def system(self) -> str:
        """The system message; empty without one."""
        return next((m["content"] for m in self.messages if m["role"] == "system"), "")

    def set_system(self, text: str) -> None:
        """Set the system message, or remove it with an empty text."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    @property
    def last_question(self) -> int | None:
        """The index of the last message of the person."""
        asked = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        return asked[-1] if asked else None
