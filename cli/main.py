"""The console script. It imports nothing slow, so that Ctrl-C is quiet from the first moment."""

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

TYPE_CHECKING = False  # typing's own takes a third of the start-up time
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = 130  # the exit code of shells
IMPORTING = "<frozen importlib._bootstrap>"  # the file of frames that import
CLEAN = "\r\x1b[K\x1b[?25h"  # clears a line that says what is waited for, and shows the cursor


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as one line, without the source line that raised it.

    On a terminal it takes the place of what `output.waiting` says there.
    """
    return f"\r\x1b[K{message}\n" if sys.stderr.isatty() else f"{message}\n"


def _interrupt(terminal: list[Any] | None, _: int, frame: FrameType | None) -> None:
    """On Ctrl-C raise `KeyboardInterrupt`; while modules are imported, end the process at once.

    Libraries lose an exception there, print it, or abort.

    Args:
        terminal: the attributes to leave behind; None if stdin is not a terminal.
    """
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            if terminal is not None:
                termios.tcsetattr(sys.stdin, termios.TCSANOW, terminal)
            os.write(2, CLEAN.encode() if sys.stderr.isatty() else b"")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line and exit: 0, 1 (error), 2 (usage) or 130 (Ctrl-C).

    A failure that a person can act on is one line on stderr; see `app.Program`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell ignores it
        terminal = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
        signal.signal(signal.SIGINT, partial(_interrupt, terminal))
    gc.set_threshold(1_000_000)  # imports make many objects and hardly any garbage
    warnings.formatwarning = _format_warning
    # Notes say so.
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
        gc.freeze()  # or the interpreter looks at every object again before it ends
