"""The cache folder, and helpers for folders."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def cache_folder(part: str) -> Path:
    """A subfolder of this platform's cache folder; it need not exist."""
    cache = Path("Library") / "Caches" if sys.platform == "darwin" else Path(".cache")
    try:
        return Path.home() / cache / "dflash-mlx" / part
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def bytes_in(folder: Path) -> int:
    """Total size of all files below a folder; 0 if it does not exist."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another program may have deleted it meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def nearest_there(folder: Path) -> Path:
    """The folder itself or its nearest existing parent: its disk and permissions count."""
    return next(path for path in (folder, *folder.parents) if path.exists())
