"""An answer on its way to stdout: reasoning is dimmed on a terminal."""

from __future__ import annotations

import sys

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
# A model's answer must not control the terminal.
CONTROL = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd")
CONTROL |= {ord("\n"): "\n", ord("\t"): "    ", ord("\r"): ""}


class Writer:
    """Writes an answer as it comes; in a pipe the text as it is."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._last = "\n"

    def write(self, parts: list[tuple[str, bool]]) -> None:
        """Write pieces of text, each with whether it is reasoning."""
        for text, dim in parts:
            if not text:
                continue
            self._last = text[-1]
            if self._terminal:
                text = text.translate(CONTROL)
                text = f"{DIM}{text}{NORMAL}" if dim else text
            sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line."""
        if self._last != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()
