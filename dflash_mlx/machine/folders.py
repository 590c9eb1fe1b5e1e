"""Where measurements of this machine are kept between runs, and what is there of a folder."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def cache_folder(part: str) -> Path:
    """Where this platform keeps what can be made again; the folder need not exist."""
    cache = Path("Library") / "Caches" if sys.platform == "darwin" else Path(".cache")
    try:
        return Path.home() / cache / "dflash-mlx" / part
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def bytes_in(folder: Path) -> int:
    """What the files in a folder take, and in those below it; 0 if it is not there."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another program may have deleted it meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def nearest_there(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: whose disk and permissions count."""
    return next(path for path in (folder, *folder.parents) if path.exists())
