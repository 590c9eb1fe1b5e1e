"""The command line, as its tests run it."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

PROGRAM = [sys.executable, "-c", "from dflash_mlx.cli.main import main; main()"]
HERE = Path(__file__).parent  # where the program runs: no dflash_mlx lies here to be imported


def run(
    *arguments: object, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """One run of the program in this process, which saves the two seconds that importing takes.

    A traceback fails the test.
    """
    from dflash_mlx.cli.app import app

    command = [*map(str, arguments)]
    options = {"input": stdin, "prog_name": "dflash-mlx", "catch_exceptions": False}
    with contextlib.chdir(HERE):
        done = CliRunner(env=environment).invoke(app, command, **options)
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


def start(*arguments: str | Path, stdin: str = "", **options) -> subprocess.CompletedProcess[str]:
    """One run of the program in a process of its own, with its output in a pipe."""
    command = [*PROGRAM, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": HERE} | options
    return subprocess.run(command, input=stdin, **options)


def run_code(code: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which finds our test helpers."""
    command = [sys.executable, "-c", code]
    options = {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=HERE, timeout=timeout, **options)


def hear_ctrl_c() -> None:
    """Run in the child before exec: restores SIGINT, which a background job would ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
