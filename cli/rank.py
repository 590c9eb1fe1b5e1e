"""What a supervisor runs on every machine: one rank of a command.

    python -m dflash_mlx.cli.rank '{"rank": 1, ...}' generate --model NAME ...

The first argument comes from `cluster.supervisor`. MLX reads its part from environment variables
and files when it is imported and when the ranks meet.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dflash_mlx.cluster.member import RankProcess


def main() -> None:
    """Run the command as the rank that the first argument describes."""
    first, *arguments = sys.argv[1:]
    start = json.loads(first)
    reading = writing = start.get("line")
    if reading is None:  # stdin and stdout are the line: prints go to stderr from now on
        reading, writing = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    process = RankProcess(reading, writing, start.get("listening"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= _environment(start, Path(folder))
        from .app import app

        app(arguments, prog_name="dflash-mlx", obj=process)


def _environment(start: dict[str, Any], folder: Path) -> dict[str, str]:
    """The variables that MLX reads, some of them names of files."""
    found = {"MLX_RANK": str(start["rank"])} | start["environment"]
    for name, content in start["files"].items():
        path = folder / name
        path.write_text(json.dumps(content))
        found[name] = str(path)
    return found


if __name__ == "__main__":
    main()
