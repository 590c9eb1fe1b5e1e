"""`dflash-mlx chat` on a terminal, and what a person sees of it."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pexpect
import pyte
from program import HERE, PROGRAM

READY = "\x1b[?2004h"  # a prompt has begun: from here on the terminal marks what is pasted
PASTE = "\x1b[200~{}\x1b[201~"  # how it does that
SIZE = ("COLUMNS", "LINES")
HIGH = 400  # so high that nothing scrolls away


class Screen(pyte.Screen):
    """A screen whose terminal answers the program, as one that is asked for its cursor."""

    program: pexpect.spawn

    def write_process_input(self, data: str) -> None:
        """Called with the answer."""
        self.program.send(data)


class Terminal:
    """The program on a terminal of its own.

    Args:
        home: the folder of its person, where the history lies.
        columns: how wide it is; nothing scrolls away.
        arguments: options of the command.
        environment: in addition to our own.
    """

    def __init__(
        self, home: Path, columns: int, *arguments: str, command: str = "chat", **environment: str
    ) -> None:
        self.shown = ""
        self.screen = Screen(columns, HIGH)
        self.stream = pyte.Stream(self.screen)
        variables = {name: value for name, value in os.environ.items() if name not in SIZE}
        variables |= {"TERM": "xterm-256color", "HOME": str(home), **environment}
        options = {"dimensions": (HIGH, columns), "encoding": "utf-8", "timeout": 60, "cwd": HERE}
        self.program = pexpect.spawn(
            PROGRAM[0],
            [*PROGRAM[1:], command, *arguments],
            env=variables,
            # A job in the background passes on that Ctrl-C is ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
            **options,
        )
        self.screen.program = self.program
        self.program.logfile_read = self

    def write(self, text: str) -> None:
        """Called with all that the program shows."""
        self.shown += text
        self.stream.feed(text)

    def flush(self) -> None:
        """Record the call."""

    def type(self, text: str, enter: bool = True) -> None:
        """Type a line once the program asks for one."""
        self.program.expect_exact(READY)
        self.program.send(text + "\r" * enter)

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return [line.rstrip() for line in self.screen.display]

    def leave(self) -> str:
        """Ctrl-D; all that was seen, its lines joined."""
        self.program.expect_exact(READY)
        self.program.sendeof()
        self.program.expect(pexpect.EOF)
        self.program.close()
        assert self.program.exitstatus == 0, self.lines
        return re.sub(r"\s+", " ", "\n".join(self.lines))
