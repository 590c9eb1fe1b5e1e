"""The console script. It imports nothing slow, so that Ctrl-C is quiet from the start."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import termios
import warnings
from functools import partial
from types import FrameType

TYPE_CHECKING = False  # importing it from typing takes a third of the start-up time
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = 130  # the exit code that shells use after Ctrl-C
IMPORTING = "<frozen importlib._bootstrap>"  # the file name of a frame that imports
CLEAN = "\r\x1b[K\x1b[?25h"  # clears the line on a terminal, and shows the cursor


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning as one line, without the source line that raised it.

    On a terminal it overwrites the line of `output.waiting`.
    """
    return f"\r\x1b[K{message}\n" if sys.stderr.isatty() else f"{message}\n"


def _interrupt(terminal: list[Any] | None, _: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise `KeyboardInterrupt`, or end the process if a module is being imported.

    Libraries lose, print or abort on an exception during their import.

    Args:
        terminal: the terminal's attributes to restore; None if stdin is not a terminal.
        frame: the frame that runs.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            if terminal is not None:
                termios.tcsetattr(sys.stdin, termios.TCSANOW, terminal)
            os.write(2, CLEAN.encode() if sys.stderr.isatty() else b"")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _open_closed_streams() -> None:
    """Open the null device as each standard stream that the caller closed (`<&-`).

    Otherwise the next file or socket gets its number, and receives what is meant for the stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # it gets the lowest free number: the stream's
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def main() -> None:
    """Run the command line and exit: 0, 1 (error), 2 (usage) or 130 (Ctrl-C).

    `app.Program` prints an error that a person can act on as one line on stderr.
    """
    _open_closed_streams()
    # A shell starts background jobs with SIGINT ignored. Leave it so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        terminal = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
        signal.signal(signal.SIGINT, partial(_interrupt, terminal))
    gc.set_threshold(1_000_000)  # imports make many objects and hardly any garbage
    warnings.formatwarning = _format_warning
    # Commands print these as notes.
    warnings.filterwarnings("ignore", "dflash-mlx: no drafter is known")
    warnings.filterwarnings("ignore", "dflash-mlx: MLX's own matrix products are slow")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the character shows "?"
    try:
        if sys.platform == "darwin":
            from .command_buffers import apply_fastest

            apply_fastest()
        from .app import app

        app(prog_name="dflash-mlx")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # otherwise the interpreter visits every object again before it ends
