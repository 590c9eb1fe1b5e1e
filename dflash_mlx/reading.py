"""Files that others wrote, read within bounds, and what their values may be.

Whatever comes with a model may be damaged, or made to do damage. So a file is opened only when it
is one (a pipe would wait for ever), its size is judged before it is read, and a number before it
is used: Python's whole numbers have no end, and `float` and `math.isfinite` raise for large ones.
"""

from __future__ import annotations

import json
import stat
import sys
from numbers import Integral
from pathlib import Path
from typing import Any

from .errors import ConfigError, DFlashError

MOST_JSON = 2**26  # bytes; the largest tokenizer.json that are published have half of it
MOST_WHOLE = 2**31 - 1  # what MLX counts in, and more than any size of a model
MOST_BYTES = 2**63 - 1  # what files and memories are counted in
_SHOWN = 60  # characters of a value in a message


def read_json(path: str | Path, kind: type[DFlashError] = ConfigError) -> dict[str, Any]:
    """The JSON object in a file.

    Raises `kind`: not a file (a folder, a pipe, a link to nowhere), not allowed to be read,
    larger than 64 MiB, not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        size = check_file(path, kind)
        if size > MOST_JSON:
            raise kind(f"{path}: {size:,} bytes are more than a file of its kind has.")
        content = parse_json(Path(path).read_bytes(), path, kind)
    except OSError as error:
        raise kind(f"{path}: cannot be read ({error.strerror}).") from error
    if not isinstance(content, dict):
        raise kind(f"{path}: a JSON object is expected, not {shown(content)}.")
    return content


def parse_json(
    content: bytes | str, path: str | Path, kind: type[DFlashError] = ConfigError
) -> Any:
    """What a JSON text says; `path` is for the message. Raises `kind`."""
    try:
        return json.loads(content if isinstance(content, str) else content.decode())
    except RecursionError as error:
        raise kind(f"{path}: not valid JSON (nested too deeply).") from error
    except ValueError as error:  # a wrong encoding is one, too
        raise kind(f"{path}: not valid JSON ({reason(error)}).") from error


def check_file(path: str | Path, kind: type[DFlashError] = ConfigError) -> int:
    """The bytes of an ordinary file. Raises `kind` for a folder or a pipe, and `OSError`."""
    found = Path(path).stat()
    if not stat.S_ISREG(found.st_mode):
        raise kind(f"{path}: a file is expected, not a folder, a pipe or a device.")
    return found.st_size


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """What a model's config says of its text: models that see as well have that apart."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def is_whole(value: Any, least: int = 1, most: float = MOST_WHOLE) -> bool:
    """Whether a value is a whole number (numpy's too, no bool, no 4.0) from `least` to `most`."""
    whole = isinstance(value, Integral) and type(value) is not bool
    return whole and least <= int(value) <= most


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
    """Another library's message in one line, short enough to be part of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 200 else f"{text[:196]} ...").rstrip(".")
