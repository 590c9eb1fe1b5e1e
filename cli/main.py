"""The console script. It imports nothing slow, so that Ctrl-C is quiet from the first moment."""

import io
import os
import sys
import warnings
from _thread import interrupt_main

AGAIN = 0.01  # seconds until a Ctrl-C comes again

# By descriptor; writing to a stdout that was closed must fail, and not go nowhere.
STREAMS = (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))


def _fill_closed_streams() -> None:
    """Put the null device where a stream is closed: else the next file takes its descriptor.

    MLX takes a file that has descriptor 0 for one that cannot be opened.
    """
    for number, (name, mode, access) in enumerate(STREAMS):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, access), number)
            setattr(sys, name, open(number, mode))


def _hear_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Have a Ctrl-C come again that came in a destructor, where Python cannot raise it."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        from threading import Timer

        Timer(AGAIN, interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    """Say a warning of ours in its own words, without the line of Python that has said it."""
    text = str(message)
    if text.startswith("dflash-mlx: "):
        print(text, file=sys.stderr)
    else:
        said = warnings.formatwarning(message, category, filename, lineno, line)
        print(said, end="", file=sys.stderr)


def main() -> None:
    """Run the command line and exit: 0, or 1 (error), 2 (usage), 130 (Ctrl-C), 141 (pipe closed).

    A failure that a person can act on is one line on stderr; see `app.Program`.
    """
    try:
        _fill_closed_streams()
        sys.unraisablehook, warnings.showwarning = _hear_again, _warn
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without the character shows "?"
        from .garbage import nothing_collected

        with nothing_collected():
            from .app import app

        app(prog_name="dflash-mlx")
    except KeyboardInterrupt:
        sys.exit(130)
