"""An answer on its way to stdout: whole words on a terminal, reasoning dimmed."""

from __future__ import annotations

import os
import sys

from rich.cells import cell_len

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
# A model's answer must not control the terminal.
CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")
CONTROL |= {ord("\n"): "\n", ord("\t"): "    ", ord("\r"): ""}


class Writer:
    """Writes an answer as it comes.

    On a terminal it breaks lines between words: a word is written when it is known to be complete.
    In a pipe the text is written as it is.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._word, self._column, self._dim = "", 0, False
        self._last = "\n"

    def write(self, parts: list[tuple[str, bool]]) -> None:
        """Write pieces of text, each with whether it is reasoning."""
        for text, dim in parts:
            if text:
                self._last = text[-1]
            if not self._terminal:
                sys.stdout.write(text)
                continue
            if dim != self._dim:
                self._flush()
                self._dim = dim
            for character in text.translate(CONTROL):
                self._lay(character)
        sys.stdout.flush()

    def end(self) -> None:
        """Write what is left, and end the line."""
        self._flush()
        if self._last != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _lay(self, character: str) -> None:
        if character == "\n":
            self._flush()
            sys.stdout.write("\n")
            self._column = 0
        elif character == " ":
            self._flush()
            self._word = " "
        else:
            if cell_len(character) > 1:  # scripts of wide letters break anywhere
                self._flush()
            self._word += character

    def _flush(self) -> None:
        """Write the waiting word, on a new line if it does not fit on this one."""
        word = self._word
        columns = os.get_terminal_size(sys.stdout.fileno()).columns if self._terminal else 0
        if self._column and self._column + cell_len(word) > columns > 0:
            sys.stdout.write("\n")
            self._column, word = 0, word.lstrip(" ")
        self._column += cell_len(word)
        sys.stdout.write(f"{DIM}{word}{NORMAL}" if self._dim and word else word)
        self._word = ""
