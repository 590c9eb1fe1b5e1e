"""`dflash-mlx chat` on an emulated terminal, and the text on its screen."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pexpect
import pyte
from program import HERE, PROGRAM

READY = "\x1b[?2004h"  # sent at a prompt: from now on the terminal marks pasted text
PASTE = "\x1b[200~{}\x1b[201~"  # pasted text with its marks
SIZE = ("COLUMNS", "LINES")
HEIGHT = 400  # so many lines that nothing scrolls away


class Screen(pyte.Screen):
    """A screen that answers the program's questions, such as for the cursor's position."""

    program: pexpect.spawn

    def write_process_input(self, data: str) -> None:
        """Called by pyte with an answer."""
        self.program.send(data)


class Terminal:
    """The program, running on a new terminal.

    Args:
        home: the user's home folder, which contains the history.
        columns: the width of the terminal.
        arguments: options of the command.
        environment: further environment variables.
    """

    def __init__(
        self, home: Path, columns: int, *arguments: str, command: str = "chat", **environment: str
    ) -> None:
        self.shown = ""
        self.screen = Screen(columns, HEIGHT)
        self.stream = pyte.Stream(self.screen)
        variables = {name: value for name, value in os.environ.items() if name not in SIZE}
        variables |= {"TERM": "xterm-256color", "HOME": str(home), **environment}
        options = {"dimensions": (HEIGHT, columns), "encoding": "utf-8", "timeout": 60, "cwd": HERE}
        self.program = pexpect.spawn(
            PROGRAM[0],
            [*PROGRAM[1:], command, *arguments],
            env=variables,
            # A background job ignores Ctrl-C, which its child processes inherit.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
            **options,
        )
        self.screen.program = self.program
        self.program.logfile_read = self

    def write(self, text: str) -> None:
        """Called by pexpect with all output of the program."""
        self.shown += text
        self.stream.feed(text)

    def flush(self) -> None:
        """Called by pexpect after each output."""

    def type(self, text: str, enter: bool = True) -> None:
        """Type a line at the program's next prompt."""
        self.program.expect_exact(READY)
        self.program.send(text + "\r" * enter)

    @property
    def lines(self) -> list[str]:
        """The lines on the screen."""
        return [line.rstrip() for line in self.screen.display]

    def leave(self) -> str:
        """Press Ctrl-D at the next prompt. Returns all lines of the screen, joined by spaces."""
        self.program.expect_exact(READY)
        self.program.sendeof()
        self.program.expect(pexpect.EOF)
        self.program.close()
        assert self.program.exitstatus == 0, self.lines
        return re.sub(r"\s+", " ", "\n".join(self.lines))
