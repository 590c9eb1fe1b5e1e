"""Run pip, and show what it downloads and installs, in one line instead of hundreds.

    .venv/bin/python scripts/install.py --editable '.[mlx]'

Takes pip install's arguments. On a terminal the line changes in place; elsewhere each download is a
line. If pip fails, its whole output is shown.
"""

from __future__ import annotations

import re
import subprocess
import sys

CLEAR = "\r\x1b[K"
WIDTH = 78
# The lines of pip's output that are shown in another form.
LOOKED_UP = re.compile(r"Collecting (?P<name>[\w.-]+)")
FETCHED = re.compile(
    r" *(?:Downloading|Using cached) (?:\S*/)?(?P<name>[\w.]+?)-(?P<version>\d[\w.]*?)-\S*\.whl"
    r"(?P<size> \([\d.]+ [kMG]B\))"
)
INSTALLED = re.compile(r"Installing collected packages: (?P<names>.*)")


def shown(line: str) -> tuple[str, bool] | None:
    """What to show for a line of pip, and whether to show it where there is no terminal.

    Returns None for lines that are not shown.
    """
    if match := FETCHED.match(line):
        version = f"{match['name'].replace('_', '-')} {match['version']}{match['size']}"
        return f"  fetching {version}", True
    if match := LOOKED_UP.match(line):
        return f"  looking for {match['name']}", False
    if match := INSTALLED.match(line):
        count = len(match["names"].split(", "))
        return f"  installing {count} package{'s' * (count > 1)}", True
    return None


def install(arguments: list[str]) -> int:
    """Run pip with these arguments; return its exit status."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    terminal = sys.stdout.isatty()
    output = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, bufsize=1) as pip:
        for line in pip.stdout:
            output.append(line)
            text, without_terminal = shown(line) or ("", False)
            if text and terminal:
                print(f"{CLEAR}{text[:WIDTH]}", end="", flush=True)
            elif without_terminal:
                print(text, flush=True)
    if terminal:
        print(CLEAR, end="", flush=True)
    if pip.returncode:
        print("".join(output), end="", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(install(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
