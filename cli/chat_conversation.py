"""The conversation of a chat, with a model in this process or behind a server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
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
TOO_LONG = "context_length_exceeded"  # the code in a server's error about a long conversation
# Sent to servers even if they have our default value, because servers have other defaults.
ALWAYS_SENT = ("temperature", "top_p", "max_tokens")


class LocalModel:
    """A model in this process. Its caches stay from turn to turn.

    Args:
        pair: the model and its drafter.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair: Pair | None = pair
        self.name = pair.target.name
        self.title = pair.title
        self._pair = pair
        self._conversation = dflash_mlx.Conversation(pair.target, pair.drafter, pair.kv_bits)

    def stream(self, messages: Messages, settings: dict[str, Any]) -> Generator[AnswerPiece]:
        """Answer a conversation, piece by piece. Raises `PromptError` if it is too long."""
        from dflash_mlx.prompt import encode_prompt

        target = self._pair.target
        ids = encode_prompt(target, messages, template_variables(target, settings))
        thoughts = Thoughts(target, ids)
        settings = without_template(settings)
        settings |= {"policy": self._pair.policy, "conversation": self._conversation}
        for event in dflash_mlx.stream_generate(target, self._pair.drafter, ids, **settings):
            yield AnswerPiece(
                parts=thoughts.split(event),
                stats=event.stats,
                finish_reason=event.finish_reason,
                thoughts=thoughts,
            )


class ServedModel:
    """A model behind a server with OpenAI's API. Every turn sends the whole conversation.

    Args:
        url: the server's address.
        model: the model's name there; None means the first one that the server offers.
        key: the API key, if the server needs one.

    Raises `ServerError`.
    """

    pair: Pair | None = None

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        from dflash_mlx.bench.server_bench import ServerClient

        self._server = ServerClient.find(url, model, key)
        self.name = self._server.model
        self.title = f"{self.name} · {self._server.url}"

    def stream(self, messages: Messages, settings: dict[str, Any]) -> Generator[AnswerPiece]:
        """Answer a conversation, piece by piece.

        Raises `PromptError` if it is too long, and `ServerError`.
        """
        fields = {}
        for name, value in settings.items():
            if name in ALWAYS_SENT or value not in (SETTINGS[name].default, (), []):
                fields["enable_thinking" if name == "think" else name] = value
        stats = Stats(seed=settings["seed"])
        finish_reason = "stop"
        try:
            with closing(self._server.stream(messages, stats, **fields)) as pieces:
                for reasoning, text, reason in pieces:
                    finish_reason = reason or finish_reason
                    yield AnswerPiece([(reasoning, True), (text, False)], stats)
        except ServerError as error:
            if TOO_LONG in str(error):
                raise PromptError("The conversation is too long for the server's model.") from error
            raise
        yield AnswerPiece([], stats, finish_reason)


class Chat:
    """A conversation with a model, on a terminal or in a pipe.

    Args:
        model: the model that answers.
        settings: settings of `stream_generate` for the next answers; /set changes them.
        messages: earlier messages.
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
        self.model = model
        self.messages = messages
        self.settings: dict[str, Any] = {}
        self.change(settings)
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.leaving = False
        self.stopped = False
        self._verbose = verbose
        self._is_streaming = False  # whether the answer's first piece is there

    def ask(self, text: str) -> None:
        """Answer a message."""
        self.answer([*self.messages, {"role": "user", "content": text}])

    def answer(self, messages: Messages) -> None:
        """Answer a conversation, and continue it with the answer. An error changes nothing.

        Ctrl-C stops the answer and keeps its text. Raises `DFlashError` only in a pipe.
        """
        writer = Writer()
        content = ""
        last_piece = None
        try:
            pieces = self.model.stream(messages, dict(self.settings))
            with self._ctrl_c_stops(), closing(pieces):
                # Without a spinner, because its thread would outlive a Ctrl-C.
                with waiting("Reading the prompt", spinner=False):
                    piece = next(pieces, None)
                self._is_streaming = True
                while piece is not None:
                    last_piece = piece
                    writer.write(piece.parts)
                    content += piece.content
                    if self.stopped:
                        break
                    piece = next(pieces, None)
        except DFlashError as error:
            if not self.interactive:
                raise
            writer.end()
            is_prompt = isinstance(error, PromptError)
            hint = " /clear starts a new conversation." if is_prompt else ""
            error_line(f"{error}{hint}")
            return
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            self.stopped = True
        writer.end()
        if last_piece is not None:
            self.messages = [*messages, {"role": "assistant", "content": content}]
            self._report(last_piece)
        elif self.stopped:
            note("Stopped before the answer; the message is not kept.")

    @contextmanager
    def _ctrl_c_stops(self) -> Iterator[None]:
        """Make a person's Ctrl-C stop an answer between two steps, so that caches stay intact.

        Before the first piece, and the second time, Ctrl-C interrupts immediately.
        """

        def stop(*_: object) -> None:
            if self.stopped or not self._is_streaming:
                raise KeyboardInterrupt
            self.stopped = True

        self._is_streaming = False
        self.stopped = False
        previous = signal.signal(signal.SIGINT, stop) if self.interactive else None
        try:
            yield
        finally:
            if previous is not None:
                signal.signal(signal.SIGINT, previous)

    def change(self, settings: dict[str, Any]) -> None:
        """Change settings for the next answers. An invalid one raises `SettingsError`."""
        from dflash_mlx.generation import GenerationSettings

        changed = with_seed(self.settings | settings)
        checked = GenerationSettings(**changed)
        if self.model.pair is not None:
            checked.check_vocabulary(self.model.pair.target.vocab_size)
        self.settings = changed

    def _report(self, piece: AnswerPiece) -> None:
        """Print a line about an answer: its length, its speed, and how its prompt was read."""
        stats = piece.stats
        pair = self.model.pair
        length = counted(stats.output_tokens, "token")
        if piece.thoughts is not None and piece.thoughts.tokens:
            length += f" ({piece.thoughts.tokens} in thoughts)"
        parts = [length]
        if stats.decode_seconds and stats.output_tokens > MIN_STEPS:
            parts.append(f"{rate(stats.tokens_per_second)} tok/s")
        plain_speed = pair.plain_speed() if pair else None
        if plain_speed and stats.rounds >= MIN_STEPS:
            speedup = times(stats.tokens_per_second / plain_speed, stats.acceptance_length)
            part = f"~{speedup} plain"
            if speedup.endswith("?"):
                part += " (other programs disturbed the timing)"
            parts.append(part)
        if pair and pair.drafter is not None and stats.rounds:
            parts.append(f"{stats.acceptance_length:.1f} tokens per step")
        if self.stopped:
            parts.append("stopped")
        elif piece.finish_reason == "length":
            limit = pair.limit_reached(stats) if pair else "cut off by --max-tokens"
            if self.interactive:
                limit = limit.replace("--max-tokens", "/set max_tokens")
            parts.append(limit)
        new_tokens = stats.prompt_tokens - stats.reused_tokens
        parts.append(f"prompt: {new_tokens} new, {stats.reused_tokens} cached")
        note(" · ".join(parts))
        if pair and self._verbose:
            explain(pair, stats, self.settings["temperature"])

    @property
    def system(self) -> str:
        """The system message; empty without one."""
        for message in self.messages:
            if message["role"] == "system":
                return message["content"]
        return ""

    def set_system(self, text: str) -> None:
        """Set the system message, or remove it with an empty text."""
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    @property
    def last_question(self) -> int | None:
        """The index of the person's last message; None if there is none."""
        for index in reversed(range(len(self.messages))):
            if self.messages[index]["role"] == "user":
                return index
        return None
