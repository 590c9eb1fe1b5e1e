"""Running the command line in tests."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

PROGRAM = [sys.executable, "-c", "from dflash_mlx.cli.main import main; main()"]
HERE = Path(__file__).parent  # the working folder of the program, without a dflash_mlx to import


def run(
    *arguments: object, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the program in this process, which saves the two seconds of importing it.

    An exception fails the test.
    """
    from dflash_mlx.cli.app import app

    command = [str(argument) for argument in arguments]
    with contextlib.chdir(HERE):
        result = CliRunner(env=environment).invoke(
            app, command, input=stdin, prog_name="dflash-mlx", catch_exceptions=False
        )
    return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)


def start(*arguments: str | Path, stdin: str = "", **options) -> subprocess.CompletedProcess[str]:
    """Run the program in a new process, with its output in a pipe."""
    command = [*PROGRAM, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": HERE} | options
    return subprocess.run(command, input=stdin, **options)


def run_code(code: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process that can import the test helpers."""
    command = [sys.executable, "-c", code]
    options = {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=HERE, timeout=timeout, **options)


def hear_ctrl_c() -> None:
    """Restore SIGINT, which background jobs ignore. Runs in the child process before exec."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
