"""Text on a terminal as it comes, broken between words, also when the window becomes narrower."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

from rich.cells import cell_len

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
TAB = 8
BETWEEN = " · "  # the parts of a line
COLUMNS = 80  # where a terminal does not know its width
# A model's answer must not steer the terminal.
UNSEEN = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")
UNSEEN |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


class Wrapped:
    """Lays text out in lines of whole words.

    A word is written when the next character shows that it is complete. Only what is longer than a
    line is cut; scripts that put no spaces between words break before any letter.

    Args:
        size: the columns and rows of the terminal, asked for again and again.
        write: takes what goes to the terminal.
    """

    def __init__(self, size: Callable[[], tuple[int, int]], write: Callable[[str], object]) -> None:
        self._size, self._write = size, write
        self._columns = size()[0] or COLUMNS
        self._text: list[tuple[str, bool]] = []  # all of it, to be drawn again
        self._begin()

    def _begin(self) -> None:
        self._column = self._widest = 0  # of what was written
        self._gap = self._word = ""  # spaces and a word that are not yet
        self._cells = 0  # of that word
        self._dim = False

    def put(self, text: str, dim: bool) -> None:
        """Add text, of which the last word may have to wait for the next call."""
        text = text.translate(UNSEEN)
        self._text.append((text, dim))
        self._lay(text, dim)

    def fit(self) -> None:
        """Follow a window that has changed. One that cuts the lines begins a new screen.

        Whether a terminal breaks lines that have become too long or hides their ends, none says.
        So where they begin is unknown, and the whole text goes to the top of a screen of its own;
        what was there scrolls away as if more had been written.
        """
        columns, rows = self._size()
        columns = columns or COLUMNS
        if columns == self._columns:
            return
        self._columns = columns
        if self._widest > columns:
            self._write(f"\x1b[{rows};1H" + "\n" * rows + "\x1b[H")
            self._begin()
            for text, dim in self._text:
                self._lay(text, dim)

    def flush(self) -> None:
        """Write the word that waits: it is complete."""
        if not self._word:
            return
        if self._column and self._column + len(self._gap) + self._cells > self._columns:
            self._newline()
        gap = self._gap[: max(0, self._columns - self._column - self._cells)]
        self._column += len(gap) + self._cells
        self._widest = max(self._widest, self._column)
        text = gap + self._word
        self._write(f"{DIM}{text}{NORMAL}" if self._dim else text)
        self._gap, self._word, self._cells = "", "", 0

    def _lay(self, text: str, dim: bool) -> None:
        if dim != self._dim:
            self.flush()
            self._dim = dim
        for character in text:
            if character == "\n":
                self.flush()
                self._newline()
            elif character == "\t":
                self.flush()
                self._gap += " " * (TAB - (self._column + len(self._gap)) % TAB)
            elif character == " ":
                self.flush()
                self._gap += " "
            else:
                cells = cell_len(character)
                if _breaks_before(character) or self._cells + cells > self._columns:
                    self.flush()
                self._word += character
                self._cells += cells

    def _newline(self) -> None:
        self._write("\n")
        self._column, self._gap = 0, ""


def _breaks_before(character: str) -> bool:
    """Whether it is a letter of a script without spaces, such as Chinese or Japanese."""
    return (
        unicodedata.east_asian_width(character) == "W" and unicodedata.category(character) == "Lo"
    )


def packed(parts: list[str], columns: int, between: str = BETWEEN) -> list[str]:
    """The parts in as few lines as hold them, each of at most so many columns where it can."""
    lines = parts[:1]
    for part in parts[1:]:
        longer = lines[-1] + between + part
        if cell_len(longer) <= columns:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines
