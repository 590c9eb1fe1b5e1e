"""Run the program in a terminal and save its final screen as an SVG.

    python scripts/record_session.py docs/session.svg generate --compare "What is 47 plus 38?"

Draws the screen at the end of a real run. Needs pexpect and pyte.
"""

import os
import re
import shlex
import sys
from itertools import groupby

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

LINES, COLUMNS = 60, 80
NAMES = {"default": None, "brown": "yellow"}  # pyte's names of colours where Rich has others


def run(arguments: list[str]) -> pyte.Screen:
    """The screen after a run of the program."""
    screen = pyte.Screen(COLUMNS, LINES)
    command = shlex.join([sys.executable, "-m", "dflash_mlx", *arguments])
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    told, code = pexpect.run(
        command, env=os.environ | size, dimensions=(LINES, COLUMNS), timeout=600, withexitstatus=1
    )
    pyte.ByteStream(screen).feed(told)
    if code:
        sys.exit(f"dflash-mlx {shlex.join(arguments)} failed with exit code {code}")
    return screen


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
    out, *arguments = sys.argv[1:]
    console = Console(width=COLUMNS, record=True, file=open(os.devnull, "w"), force_terminal=True)
    console.print(Text(f"$ dflash-mlx {shlex.join(arguments)}", style="bold"))
    for line in lines_of(run(arguments)):
        console.print(line, soft_wrap=True)
    console.save_svg(out, title="dflash-mlx")


if __name__ == "__main__":
    main()
