"""Files that a command writes: whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dflash_mlx.errors import SettingsError


def as_line(content: dict[str, Any]) -> str:
    """The JSON object of `--json`, as it stands in a file."""
    return json.dumps(content, ensure_ascii=False) + "\n"


def as_text(answer: str) -> str:
    """An answer as it stands on stdout: its last line is a whole one."""
    return answer if not answer or answer.endswith("\n") else answer + "\n"


def check_writable(path: Path) -> None:
    """Refuse a path that cannot become a file, before any work. Raises `SettingsError`."""
    folder = path.resolve().parent
    if path.exists() and not path.is_file():
        raise SettingsError(f"{path} is not a file: choose another --output.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(f"{folder} is not a folder to write to: choose another --output.")


def write_whole(path: Path, text: str) -> None:
    """Write the text beside `path` and move it there: a failure leaves what was there before.

    Raises `OSError`, with nothing left behind.
    """
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
