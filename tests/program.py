"""The command line in a process of its own, as its tests run it."""

import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = [sys.executable, "-c", "from dflash_mlx.cli.main import main; main()"]
HERE = Path(__file__).parent  # where the program runs: no dflash_mlx lies here to be imported


def run(*arguments: str | Path, stdin: str = "", **options) -> subprocess.CompletedProcess[str]:
    """One run of the program, with its output in a pipe."""
    command = [*PROGRAM, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": HERE} | options
    return subprocess.run(command, input=stdin, **options)


def hear_ctrl_c() -> None:
    """In a child before it becomes the program: undo that a background job ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
