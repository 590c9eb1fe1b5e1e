"""An answer on its way to the screen: thinking dimmed, and a ribbon of what every round kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from .chat_wrap import DIM, NORMAL, Wrapped

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
ROUNDS = 72  # of a ribbon


class Writer:
    """Writes text to stdout as it comes.

    Args:
        tags: what begins and ends thinking; None for a model that does not think.
        thinking: whether the text begins in the middle of it, as the prompt said.
        styled: whether thinking is dimmed; without, the text is written as it is.
        size: the columns and rows of the terminal, where lines are to be broken between words.
    """

    def __init__(
        self,
        tags: tuple[str, str] | None,
        thinking: bool = False,
        styled: bool = True,
        size: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._wrapped = None if size is None else Wrapped(size, sys.stdout.write)
        self._tags = tags if styled else None
        self._thinking = thinking and self._tags is not None
        self._held = ""  # may be the start of a tag
        self._last = "\n"

    def write(self, text: str) -> None:
        """Write all that is certain to be no half of a tag."""
        if self._wrapped is not None:
            self._wrapped.fit()
        self._held += text
        while self._tags is not None:
            tag = self._tags[self._thinking]
            before, found, after = self._held.partition(tag)
            if not found:
                break
            # The tags belong to the thinking and are dimmed with it.
            self._put(before, self._thinking)
            self._put(tag, True)
            self._held, self._thinking = after, not self._thinking
        border = len(self._held) - self._possible_tag()
        self._put(self._held[:border], self._thinking)
        self._held = self._held[border:]
        sys.stdout.flush()

    def end(self) -> None:
        """Write what is left, and end the line."""
        self._put(self._held, self._thinking)
        self._held = ""
        if self._wrapped is not None:
            self._wrapped.fit()
        if self._last != "\n":
            self._put("\n", False)
        sys.stdout.flush()

    def _put(self, text: str, dim: bool) -> None:
        if not text:
            return
        self._last = text[-1]
        if self._wrapped is not None:
            self._wrapped.put(text, dim)
        else:
            sys.stdout.write(f"{DIM}{text}{NORMAL}" if dim else text)

    def _possible_tag(self) -> int:
        """How many of the last held characters may be the start of a tag."""
        if self._tags is None:
            return 0
        tag = self._tags[self._thinking]
        lengths = range(min(len(tag) - 1, len(self._held)), 0, -1)
        return next((n for n in lengths if tag.startswith(self._held[-n:])), 0)


def terminal_size() -> tuple[int, int]:
    """Columns and rows of the terminal at stdout, as they are now."""
    return os.get_terminal_size(sys.stdout.fileno())


def ribbon(accepted: Sequence[int], most: int, rounds: int = ROUNDS, bars: str = BARS) -> str:
    """A bar for each of the last rounds, as high as the share of `most` drafts that it kept."""
    steps = len(bars) - 1
    drawn = (bars[min(steps, round(steps * count / max(1, most)))] for count in accepted[-rounds:])
    return ("…" if len(accepted) > rounds else "") + "".join(drawn)
