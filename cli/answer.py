"""An answer while it streams: its pieces, its thoughts, and how a terminal shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len

from dflash_mlx.answers.families import AnswerFormat
from dflash_mlx.answers.markers import REASONING
from dflash_mlx.answers.parser import AnswerParser
from dflash_mlx.answers.parts import Reasoning, Text
from dflash_mlx.stream import Detokenizer

if TYPE_CHECKING:
    from dflash_mlx import Event, Stats, Target

DIM = "\x1b[2m"
NORMAL = "\x1b[0m"
# Replaces control characters: a model's answer must not control the terminal.
CONTROL_CHARACTERS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")
CONTROL_CHARACTERS |= {ord("\n"): "\n", ord("\t"): "    ", ord("\r"): ""}
DEFAULT_COLUMNS = 80  # of a terminal that does not tell its width


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer.

    Attributes:
        parts: texts to show, each with whether it is reasoning.
        stats: the request's counters so far.
        finish_reason: "stop" or "length" at the end of the answer.
        thoughts: counts the thoughts; None for a model behind a server.
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
        target: the model that answers.
        ids: the prompt's token ids.

    Attributes:
        tokens: the tokens of thoughts so far.
        rounds: the steps that produced them, without the prefill.
    """

    def __init__(self, target: Target, ids: Sequence[int]) -> None:
        tokenizer = target.tokenizer
        form = AnswerFormat.of(tokenizer)
        self._parser = AnswerParser(
            form,
            schemas={},
            starts_in_reasoning=form.starts_in_thought(tokenizer, ids),
            detokenizer=Detokenizer(tokenizer),
        )
        self.tokens = 0
        self.rounds = 0
        self._rounds_before = 0  # rounds of the whole answer before the next event

    def split(self, event: Event) -> list[tuple[str, bool]]:
        """Split an event's text, without markers, into pieces with whether each is a thought."""
        state_before = self._parser.state
        pieces = [
            (part.text, isinstance(part, Reasoning))
            for part in self._parser.read(event)
            if isinstance(part, Text | Reasoning)
        ]
        has_thought = any(is_thought for _, is_thought in pieces)
        if has_thought or REASONING in (state_before, self._parser.state):
            self.tokens += len(event.tokens)
            self.rounds += event.stats.rounds - self._rounds_before
        self._rounds_before = event.stats.rounds
        return pieces


class Writer:
    """Writes an answer while it streams: wrapped at words on a terminal, unchanged in a pipe."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last_character = "\n"
        self._is_dim = False
        self._columns = 0
        self._column = 0  # the position of the cursor
        self._word = ""  # the part of the last word that is on the screen

    def write(self, parts: list[tuple[str, bool]]) -> None:
        """Write pieces of text, each with whether it is reasoning."""
        for text, is_dim in parts:
            if not text:
                continue
            if self._is_dim and not is_dim:
                self.end()
            self._last_character = text[-1]
            self._is_dim = is_dim
            if self._is_terminal:
                text = self._wrap(text.translate(CONTROL_CHARACTERS))
                text = f"{DIM}{text}{NORMAL}" if is_dim else text
            sys.stdout.write(text)
        sys.stdout.flush()

    def _wrap(self, text: str) -> str:
        """Begin a new line before each word that does not fit.

        The beginning of such a word may already be on the screen: it is erased there. The last
        column stays free, because terminals disagree where the cursor is behind it.
        """
        columns = 0
        with suppress(OSError):
            columns = os.get_terminal_size(sys.stdout.fileno()).columns
        columns = (columns or DEFAULT_COLUMNS) - 1
        if columns != self._columns:  # the window was resized: what the line shows is unknown
            self._columns = columns
            self._column %= columns
            self._word = ""
        wrapped = ""
        for character in text:
            size = cell_len(character)
            if character == "\n":
                self._start_line()
            elif self._column + size > columns:
                self._column = cell_len(self._word)
                if character == " " or self._column + size > columns:
                    self._start_line()
                if self._column:
                    wrapped += f"\x1b[{self._column}D\x1b[K"  # erase the beginning of the word
                wrapped += f"\n{self._word}"
                character = "" if character == " " else character
            if character and character != "\n":
                self._column += size
                ends_word = character == " " or size > 1
                self._word = "" if ends_word else self._word + character
            wrapped += character
        return wrapped

    def _start_line(self) -> None:
        self._column = 0
        self._word = ""

    def end(self) -> None:
        """End the line."""
        if self._last_character != "\n":
            sys.stdout.write("\n")
            self._start_line()
            self._last_character = "\n"
        sys.stdout.flush()
