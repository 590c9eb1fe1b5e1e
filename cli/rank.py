"""One rank of a command, which a supervisor starts on every machine.

    python -m dflash_mlx.cli.rank '{"rank": 1, ...}' generate --model NAME ...

The first argument comes from `cluster.supervisor`. MLX reads its share of it from environment
variables and files, when it is imported and when the ranks meet.
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
    start = json.loads(sys.argv[1])
    # File descriptors of the connection to the supervisor.
    reading = start.get("line")
    writing = reading
    if reading is None:  # stdin and stdout are the connection, so prints go to stderr from now on
        reading = sys.stdin.fileno()
        writing = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    process = RankProcess(reading, writing, start.get("listening"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= _environment(start, Path(folder))
        from .app import app

        app(sys.argv[2:], prog_name="dflash-mlx", obj=process)


def _environment(start: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the environment variables that MLX reads, some of which name files."""
    environment = {"MLX_RANK": str(start["rank"])} | start["environment"]
    for name, content in start["files"].items():
        path = folder / name
        path.write_text(json.dumps(content))
        environment[name] = str(path)
    return environment


if __name__ == "__main__":
    main()
