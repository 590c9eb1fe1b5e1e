"""Paste the commands of README into interactive shells, as a new user with a clone would.

    python scripts/check_readme.py [--shell bash] [--shell zsh]

Pastes every shell and Python block of README in order into an interactive shell, and stops at the
first that fails. zsh, every Mac's shell, takes a comment for arguments there. Blocks that need the
hub are listed and skipped. The clone is a copy in a temporary folder without .venv, and the home
folder is temporary. Only the package index is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from experiment import copy_repository

ROOT = Path(__file__).parents[1]
PROGRAMS = re.compile(r"(\.|make|pip|uv|echo|cat|dflash-mlx|python3?) ")
HUB = re.compile(r"--(model|draft)[ =][\w.-]+/")
SHELLS = {"bash": ["bash", "--norc", "-i"], "zsh": ["zsh", "-f", "-i"]}


@dataclass(frozen=True)
class Command:
    """A command of README: a line of shell, or a Python program."""

    text: str
    python: bool = False

    @property
    def needs_hub(self) -> bool:
        """Whether it needs the hub; such commands are skipped."""
        return HUB.search(self.text) is not None

    @property
    def shell(self) -> str:
        """The command as it is pasted into a shell."""
        return f"python - <<'PROGRAM'\n{self.text}PROGRAM" if self.python else self.text


def commands(page: str) -> list[Command]:
    """The commands of a page, in order.

    A line of a block is a command if it begins with the name of a program; the others are output.
    """
    blocks: list[Command] = []
    language: str | None = None  # of the fenced block that a line is in
    program = ""
    for line in page.splitlines(keepends=True):
        text = line.strip().removeprefix("$ ")
        if line.startswith("```"):
            if language == "python":
                blocks.append(Command(program, python=True))
            language = line[3:].strip() if language is None else None
            program = ""
        elif language == "python":
            program += line
        elif (language is not None or line.startswith("    ")) and PROGRAMS.match(text):
            blocks.append(Command(text))
    return blocks


def paste(typed: list[Command], folder: Path, shell: str = "bash") -> int:
    """Paste commands into one interactive shell in a folder; return its exit status."""
    lines = ["set -e", "PS1= PS2="]
    for command in typed:
        lines += [f"printf '%s\\n' {shlex.quote('$ ' + command.text.rstrip())}"]
        # A command must not read the shell's standard input, which has the commands after it.
        lines += ["{ " + command.shell, "} < /dev/null"]
    path = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if not _is_environment(Path(part))
    )
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    with tempfile.TemporaryDirectory() as home:
        environment = kept | {"PATH": path, "HOME": home, "LANG": "C.UTF-8"}
        pasted = "\n".join([*lines, "exit 0", ""])
        program = SHELLS[shell]
        done = subprocess.run(program, cwd=folder, env=environment, input=pasted, text=True)
    return done.returncode


def _is_environment(folder: Path) -> bool:
    return (folder.parent / "pyvenv.cfg").exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shell", action="append", choices=SHELLS, help="default: all")
    options = parser.parse_args()
    every = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    run = [command for command in every if not command.needs_hub]
    for command in every:
        if command.needs_hub:
            print(f"needs the hub: {command.text}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        for shell in options.shell or SHELLS:
            print(f"In {shell}:", flush=True)
            if shutil.which(shell) is None:
                print(f"{shell} is not installed; --shell leaves others out")
                return 1
            status = paste(run, Path(folder), shell)
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
