"""Discards what a person types before the program asks for input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ignore_typing() -> Iterator[None]:
    """Neither show nor keep what is typed or pasted in this context. Ctrl-C still interrupts.

    A terminal would show it in the middle of a progress line, and keep it for the next prompt.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios

    original = termios.tcgetattr(sys.stdin)
    silent = termios.tcgetattr(sys.stdin)
    # The fourth attribute is the local modes: neither echo, nor keep lines for editing.
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, original)
