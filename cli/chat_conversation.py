"""The conversation of a chat: its messages and settings, its answers and their speed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from dflash_mlx.errors import DFlashError, PromptError

from .options import with_seed
from .output import MIN_STEPS, counted, error_line, note, rate, times, waiting
from .pair import explain

if TYPE_CHECKING:
    from .chat_models import AnswerPiece, ChatModel, Messages

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
# A model's answer must not control the terminal.
CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")
CONTROL |= {ord("\n"): "\n", ord("\t"): "    ", ord("\r"): ""}


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
    """

    def __init__(
        self,
        model: ChatModel,
        settings: dict[str, Any],
        messages: Messages,
        verbose: bool = False,
    ) -> None:
        self.model, self.messages, self._verbose = model, messages, verbose
        self.settings: dict[str, Any] = {}
        self.change(settings)
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.leaving = False

    def ask(self, text: str) -> None:
        """Answer a message."""
        self.answer([*self.messages, {"role": "user", "content": text}])

    def answer(self, messages: Messages) -> None:
        """Answer a conversation and go on from there; after an error all is as it was before.

        Ctrl-C stops the answer and keeps its text. Raises `DFlashError` only in a pipe.
        """
        writer, content, piece = Writer(), "", None
        try:
            with (
                _ctrl_c_stops(self.interactive) as interrupt,
                closing(self.model.stream(messages, dict(self.settings))) as pieces,
            ):
                for piece in _awaited(pieces):
                    interrupt.streaming = True
                    writer.write(piece.parts)
                    content += piece.content
                    if interrupt.pressed:
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
            interrupt.pressed = True
        writer.end()
        if piece is not None:
            self.messages = [*messages, {"role": "assistant", "content": content}]
            self._report(piece, interrupt.pressed)

    def change(self, settings: dict[str, Any]) -> None:
        """Change settings for the next answers, or raise `SettingsError` and change none."""
        from dflash_mlx.generation import GenerationSettings

        changed = with_seed(self.settings | settings)
        checked = GenerationSettings(**changed)
        if self.model.pair is not None:
            checked.check_vocabulary(self.model.pair.target.vocab_size)
        self.settings = changed

    def _report(self, piece: AnswerPiece, stopped: bool) -> None:
        """A line about an answer: its length, speed and speedup, and what was read for it."""
        stats, pair = piece.stats, self.model.pair
        parts = [counted(stats.output_tokens, "token")]
        if piece.thoughts is not None and piece.thoughts.tokens:
            parts[0] += f" ({piece.thoughts.tokens} in thoughts)"
        if stats.decode_seconds:
            parts.append(f"{rate(stats.tokens_per_second)} tok/s")
        if pair and stats.rounds >= MIN_STEPS and (plain := pair.plain_speed()):
            speedup = times(stats.tokens_per_second / plain, stats.acceptance_length)
            doubtful = " (other programs disturbed the timing)" * speedup.endswith("?")
            parts.append(f"~{speedup} plain{doubtful}")
        if pair and pair.drafter is not None and stats.rounds:
            parts.append(f"{stats.acceptance_length:.1f} tokens per step")
        if stopped:
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


def _awaited(pieces: Generator[AnswerPiece]) -> Iterator[AnswerPiece]:
    """The pieces; a spinner shows while the prompt is read."""
    with waiting("Reading the prompt"):
        first = next(pieces, None)
    return iter(()) if first is None else chain([first], pieces)


class Interrupt:
    """Whether an answer streams, and whether Ctrl-C was pressed meanwhile."""

    streaming = pressed = False


@contextmanager
def _ctrl_c_stops(interactive: bool) -> Iterator[Interrupt]:
    """Record Ctrl-C, so that an answer stops between two steps and the caches stay whole.

    Before the first piece, and the second time, Ctrl-C interrupts at once.
    """
    interrupt = Interrupt()

    def stop(signum: int, frame: FrameType | None) -> None:
        if interrupt.pressed or not interrupt.streaming:
            raise KeyboardInterrupt
        interrupt.pressed = True

    if not interactive:
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class Writer:
    """Writes an answer as it comes: wrapped at words on a terminal, unchanged in a pipe."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last, self._dim = "\n", False
        self._column, self._word, self._columns = 0, "", 0

    def write(self, parts: list[tuple[str, bool]]) -> None:
        """Write pieces of text, each with whether it is reasoning."""
        for text, dim in parts:
            if not text:
                continue
            if self._dim and not dim:
                self.end()
            self._last, self._dim = text[-1], dim
            if self._terminal:
                text = self._wrapped(text.translate(CONTROL))
                text = f"{DIM}{text}{NORMAL}" if dim else text
            sys.stdout.write(text)
        sys.stdout.flush()

    def _wrapped(self, text: str) -> str:
        """The text with a new line before each word that does not fit.

        The beginning of such a word may stand on the screen already: it is erased there. The last
        column stays free, because terminals disagree where the cursor is behind it.
        """
        columns, out = 0, ""
        with suppress(OSError):
            columns = os.get_terminal_size(sys.stdout.fileno()).columns
        columns = (columns or 80) - 1
        if columns != self._columns:  # resized: nothing is known of what is on the line
            self._columns, self._column, self._word = columns, self._column % columns, ""
        for char in text:
            size = cell_len(char)
            if char == "\n":
                self._column, self._word = 0, ""
            elif self._column + size > columns:
                self._column = cell_len(self._word)
                if char == " " or self._column + size > columns:
                    self._column, self._word = 0, ""
                erased = f"\x1b[{self._column}D\x1b[K" if self._column else ""
                out += f"{erased}\n{self._word}"
                char = "" if char == " " else char
            if char and char != "\n":
                self._column += size
                self._word = "" if char == " " or size > 1 else self._word + char
            out += char
        return out

    def end(self) -> None:
        """End the line."""
        if self._last != "\n":
            sys.stdout.write("\n")
            self._column, self._word = 0, ""
        sys.stdout.flush()
