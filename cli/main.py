"""The console script. It imports nothing slow, so that Ctrl-C is quiet from the first moment."""

import io
import sys

from .garbage import nothing_collected


def main() -> None:
    """Run the command line and exit: 0, or 1 (error), 2 (usage), 130 (Ctrl-C), 141 (pipe closed).

    A failure that a person can act on is one line on stderr; see `app.Commands`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the character shows "?"
    try:
        with nothing_collected():
            from .app import app

        app(prog_name="dflash-mlx")
    except KeyboardInterrupt:
        sys.exit(130)
