"""What a supervisor runs on every machine: one rank of a command.

    python -m dflash_mlx.cli.rank '{"rank": 1, ...}' generate --model NAME ...

The first argument is from `cluster.hosts` and `cluster.ranks`; MLX reads its part of it from the
environment and from files, when it is imported and the ranks meet.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dflash_mlx.cluster.supervisor_line import SupervisorLine

from .machines import Place


def main() -> None:
    """Run the command as the rank that the first argument says."""
    told, *arguments = sys.argv[1:]
    begin = json.loads(told)
    reading = writing = begin.get("line")
    if reading is None:  # stdin and stdout are the line: prints go to stderr from now on
        reading, writing = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line = SupervisorLine(reading, writing)
    line.send("pid", str(os.getpid()))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= _environment(begin, Path(folder))
        _run(arguments, Place(line, begin.get("listening")))


def _environment(begin: dict[str, Any], folder: Path) -> dict[str, str]:
    """What MLX asks for."""
    found = {"MLX_RANK": str(begin["rank"])} | begin["environment"]
    for name, content in begin["files"].items():
        path = folder / name
        path.write_text(json.dumps(content))
        found[name] = str(path)
    return found


def _run(arguments: list[str], place: Place) -> None:
    from .app import app

    app(arguments, prog_name="dflash-mlx", obj=place)


if __name__ == "__main__":
    main()
