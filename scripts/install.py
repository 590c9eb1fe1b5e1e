"""Run pip, and show what it downloads and installs, in one line instead of hundreds.

    .venv/bin/python scripts/install.py --editable '.[mlx]'

Takes pip install's arguments. On a terminal the line changes in place; elsewhere each download is a
line. If pip fails, all that it said is shown.
"""

from __future__ import annotations

import re
import subprocess
import sys

CLEAR = "\r\x1b[K"
WIDTH = 78
# What pip says of its work -> what is shown.
LOOKED_UP = re.compile(r"Collecting (?P<name>[\w.-]+)")
FETCHED = re.compile(
    r" *(?:Downloading|Using cached) (?:\S*/)?(?P<name>[\w.]+?)-(?P<version>\d[\w.]*?)-\S*\.whl"
    r"(?P<size> \([\d.]+ [kMG]B\))"
)
INSTALLED = re.compile(r"Installing collected packages: (?P<names>.*)")


def shown(line: str) -> tuple[str, bool] | None:
    """What to show for a line of pip, and whether to print it off a terminal; None: nothing."""
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
    """Run pip with these arguments; its exit status."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    terminal = sys.stdout.isatty()
    said = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, bufsize=1) as pip:
        for line in pip.stdout:
            said.append(line)
            text, counts = shown(line) or ("", False)
            if text and terminal:
                print(f"{CLEAR}{text[:WIDTH]}", end="", flush=True)
            elif counts:
                print(text, flush=True)
    if terminal:
        print(CLEAR, end="", flush=True)
    if pip.returncode:
        print("".join(said), end="", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(install(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
