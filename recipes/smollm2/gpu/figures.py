"""The figures of a run, each printed and stored as soon as it is known."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from pathlib import Path
from typing import Any


class Figures:
    """Lines of figures.jsonl, which are printed, too.

    Args:
        folder: where the file is.
        begin: the run's time.monotonic() at its beginning.
    """

    def __init__(self, folder: Path, begin: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._begin = begin

    def add(self, stage: str, **figures: Any) -> None:
        """Add a line: seconds since the beginning, the stage of the run, and its figures."""
        seconds = round(time.monotonic() - self._begin, 1)
        line = json.dumps({"seconds": seconds, "stage": stage, **figures})
        print(line, flush=True)
        with (self._folder / "figures.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def copy(self, path: Path) -> None:
        """Put a compressed copy of a file beside the figures."""
        with path.open("rb") as file, gzip.open(self._folder / f"{path.name}.gz", "wb", 3) as copy:
            shutil.copyfileobj(file, copy)
