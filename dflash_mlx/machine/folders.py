"""Where measurements of this machine are kept between runs, and what is there of a folder."""

from __future__ import annotations

import sys
from pathlib import Path


def cache_folder(part: str) -> Path:
    """Where this platform keeps what can be made again; the folder need not exist."""
    cache = Path("Library") / "Caches" if sys.platform == "darwin" else Path(".cache")
    try:
        return Path.home() / cache / "dflash-mlx" / part
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def nearest_there(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: whose disk and permissions count."""
    return next(path for path in (folder, *folder.parents) if path.exists())
