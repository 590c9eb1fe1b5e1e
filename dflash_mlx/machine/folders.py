"""Where measurements of this machine are kept between runs."""

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
