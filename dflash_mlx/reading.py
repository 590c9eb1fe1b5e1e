"""Files that others wrote, read within bounds, and what their values may be.

Whatever comes with a model may be damaged, or made to do damage. So a file is opened only when it
is one (a pipe would wait for ever), its size is judged before it is read, and a number before it
is used: Python's whole numbers have no end, and `float` and `math.isfinite` raise for large ones.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

from .errors import ConfigError

MOST_JSON = 2**25  # bytes; the largest tokenizers and indexes that are published have a third
MOST_WHOLE = 2**31 - 1  # what MLX counts in, and more than any size of a model
_SHOWN = 60  # characters of a value in a message


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises `ConfigError`: not a file (a folder, a pipe, a link to nowhere), not allowed to be read,
    larger than 32 MiB, not UTF-8, not JSON, nested too deeply, or not an object.
    """
    content = parse_json(read_bytes(path, MOST_JSON), path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is expected, not {shown(content)}.")
    return content


def parse_json(content: bytes, path: str | Path) -> Any:
    """What a JSON text says; `path` is for the message. Raises `ConfigError`."""
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ConfigError(f"{path}: not valid JSON (nested too deeply).") from error
    except ValueError as error:  # a wrong encoding is one, too
        raise ConfigError(f"{path}: not valid JSON ({reason(error)}).") from error


def read_bytes(path: str | Path, most: int) -> bytes:
    """A whole file of at most `most` bytes. Raises `ConfigError`."""
    try:
        check_file(path)
        with Path(path).open("rb") as stream:
            content = stream.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    if len(content) > most:
        raise ConfigError(f"{path}: larger than {most:,} bytes, which no file of its kind is.")
    return content


def check_file(path: str | Path) -> int:
    """The bytes of an ordinary file. Raises `ConfigError` for another kind, and `OSError`."""
    found = Path(path).stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path}: is not a file, but a folder or a device.")
    return found.st_size


def is_whole(value: Any, least: int = 1, most: int = MOST_WHOLE) -> bool:
    """Whether a value is a whole number (no bool, no 4.0) from `least` to `most`."""
    return type(value) is int and least <= value <= most


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float holds: neither NaN nor infinite nor too large."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return is_finite(value) and value > 0


def shown(value: Any) -> str:
    """A value for a message, cut where it is longer than a line may be."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def reason(error: BaseException) -> str:
    """The first line of another library's message, short enough to be part of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
