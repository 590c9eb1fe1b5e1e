"""An answer as it comes: its pieces, thoughts apart from text, and how a terminal shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len

from dflash_mlx.answers.families import AnswerFormat
from dflash_mlx.answers.parser import REASONING, AnswerParser, Reasoning, Text
from dflash_mlx.stream import Detokenizer

if TYPE_CHECKING:
    from dflash_mlx import Event, Stats, Target

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
# A model's answer must not control the terminal.
CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")
CONTROL |= {ord("\n"): "\n", ord("\t"): "    ", ord("\r"): ""}


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer.

    Attributes:
        parts: text to show, each with whether it is reasoning.
        stats: the request's counters so far.
        finish_reason: "stop" or "length" at the end of the answer.
        thoughts: counted so far; None for a model behind a server.
    """

    parts: list[tuple[str, bool]]
    stats: Stats
    finish_reason: str | None = None
    thoughts: Thoughts | None = None

    @property
    def content(self) -> str:
        """The text that belongs in the conversation."""
        return "".join(text for text, is_thought in self.parts if not is_thought)


class Thoughts:
    """Splits an answer into text and thoughts while it streams, and counts the thoughts.

    A step that ends the thoughts and begins the answer is counted with the thoughts.

    Args:
        target: what answers.
        ids: the prompt's token ids.

    Attributes:
        tokens: of the thoughts so far.
        rounds: steps that brought them, without the prefill.
    """

    def __init__(self, target: Target, ids: Sequence[int]) -> None:
        tokenizer = target.tokenizer
        form = AnswerFormat.of(tokenizer)
        begun = form.starts_in_thought(tokenizer, ids)
        self._parser = AnswerParser(form, {}, begun, detokenizer=Detokenizer(tokenizer))
        self.tokens = self.rounds = self._rounds = 0

    def split(self, event: Event) -> list[tuple[str, bool]]:
        """The event's text in pieces, each with whether it is a thought, without markers."""
        before = self._parser.state
        pieces = [
            (part.text, isinstance(part, Reasoning))
            for part in self._parser.read(event)
            if isinstance(part, Text | Reasoning)
        ]
        if REASONING in (before, self._parser.state) or any(thought for _, thought in pieces):
            self.tokens += len(event.tokens)
            self.rounds += event.stats.rounds - self._rounds
        self._rounds = event.stats.rounds
        return pieces


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
            self._column, self._word, self._last = 0, "", "\n"
        sys.stdout.flush()
