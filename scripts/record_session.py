"""Record README's picture, docs/session.svg: a chat with a real model in a terminal.

    python scripts/record_session.py

Runs the program, types the lines of a person, and draws the last screen as an SVG in which every
line appears when it did. Needs pexpect, pyte and what `make real` installs. Run it on a quiet
machine: the figures are those of the run.
"""

import os
import re
import shlex
import sys
import time
from itertools import groupby
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

FILE = Path(__file__).resolve().parent.parent / "docs" / "session.svg"
ARGUMENTS = ("chat", "--model", "smollm2")
TYPED = (
    "Write a Python function that reverses a string.",
    "Now one that counts the vowels in it.",
)
LINES = 60
COLUMNS = 80
READY = "\x1b[?2004h"  # a chat waits for a line
TYPING = 0.02  # seconds between two keys
NAMES = {"default": None, "brown": "yellow"}  # pyte's names of colours where Rich has others
# The lines of Rich's SVG, in which each has a clipping path of its own.
LINE = re.compile(r"#terminal-\d+-line-(\d+)\)")
APPEAR = "@keyframes appear { from { visibility: hidden } to { visibility: hidden } }"


class Recording:
    """A terminal's screen, and when each of its lines was last changed.

    Attributes:
        changed: seconds from the start, by the line's number.
    """

    def __init__(self) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self.changed: dict[int, float] = {}
        self._stream = pyte.Stream(self.screen)
        self._start = time.perf_counter()

    def write(self, text: str) -> None:
        """Show a piece of the program's output; pexpect calls this."""
        self._stream.feed(text)
        now = time.perf_counter() - self._start
        self.changed |= dict.fromkeys(self.screen.dirty, now)
        self.screen.dirty.clear()

    def flush(self) -> None:
        """Do nothing; pexpect calls this after each write."""


def record() -> Recording:
    """Run the program to its end, and type each line when it is asked for."""
    recording = Recording()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    program = pexpect.spawn(
        sys.executable,
        ["-m", "dflash_mlx", *ARGUMENTS],
        env=os.environ | size | {"PROMPT_TOOLKIT_NO_CPR": "1"},
        dimensions=(LINES, COLUMNS),
        encoding="utf-8",
        timeout=600,
    )
    program.logfile_read = recording
    for line in (*TYPED, "/quit"):
        program.expect_exact(READY)
        for key in f"{line}\r":
            program.send(key)
            program.expect(pexpect.TIMEOUT, timeout=TYPING)
    program.expect(pexpect.EOF)
    program.close()
    if program.exitstatus:
        sys.exit(f"dflash-mlx {shlex.join(ARGUMENTS)} failed with exit code {program.exitstatus}")
    return recording


def lines_of(screen: pyte.Screen) -> list[Text]:
    """The lines of a screen with their styles, without trailing empty ones."""
    lines = []
    for number in range(screen.lines):
        cells = [screen.buffer[number][column] for column in range(screen.columns)]
        line = Text()
        for (colour, bold), group in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
            name = NAMES.get(colour, colour.replace("bright", "bright_"))
            if name and re.fullmatch("[0-9a-f]{6}", name):  # one of 256 colours
                name = f"#{name}"
            line.append("".join(cell.data for cell in group), Style(color=name, bold=bold))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def main() -> None:
    console = Console(width=COLUMNS, record=True, file=open(os.devnull, "w"), force_terminal=True)
    console.print(Text(f"$ dflash-mlx {shlex.join(ARGUMENTS)}", style="bold"))
    recording = record()
    for line in lines_of(recording.screen):
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title="dflash-mlx", unique_id="terminal-0")

    def timed(match: re.Match[str]) -> str:
        # Line 0 is the command. What knows no animations shows the last screen.
        seconds = recording.changed.get(int(match[1]) - 1, 0.0)
        return f'{match[0]}" style="animation: appear {seconds:.2f}s'

    svg = LINE.sub(timed, svg.replace("<style>", f"<style>\n    {APPEAR}", 1))
    FILE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
