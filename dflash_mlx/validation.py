"""Checks of what comes from outside: files, settings, and the errors of other libraries.

A model folder may be damaged, or malicious. So only ordinary files are opened, because a pipe would
block. A file's size is checked before it is read, and a number before it is used: Python's integers
are unbounded, and `float` and `math.isfinite` raise for large ones.

Other libraries expect intact files, and raise their own errors for damaged ones. An `ErrorWrapper`
goes around one call of one library, and names the classes that this call raises. It never goes
around a caller's function, so the caller's own errors pass through unchanged.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from .errors import ConfigError, DFlashError, SettingsError

MAX_JSON_BYTES = 2**26  # twice the largest published tokenizer.json
UTF8 = "utf-8-sig"  # UTF-8, without the byte order mark that Windows and spreadsheets write
MAX_INT32 = 2**31 - 1  # MLX's index type, and more than any size in a model
MAX_BYTES = 2**63 - 1  # the largest file or memory size
# What looking at a path raises: OSError if it is too long or forbidden, ValueError if it has a NUL.
PATH_ERRORS = (OSError, ValueError)
_MAX_REPR = 60  # characters of a value in an error message
_MAX_REASON = 200  # characters of another library's message in ours


class TokenizersError(Exception):
    """Stands in `ErrorWrapper.classes` for what tokenizers raises: a bare Exception, or a panic."""


# What tokenizers, transformers and mlx-lm raise when they encode a text or decode token ids.
TOKENIZER_ERRORS = (
    AttributeError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
    TokenizersError,
)


@dataclass(frozen=True)
class ErrorWrapper(AbstractContextManager["ErrorWrapper", None]):
    """A context around one call of another library, which turns the library's errors into ours.

    Attributes:
        error: the error to raise instead.
        message: what is wrong. The library's reason follows in brackets.
        classes: the errors that the call raises.
    """

    error: type[DFlashError]
    message: str
    classes: tuple[type[BaseException], ...]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise our error in place of one of `classes`."""
        if error is None or isinstance(error, DFlashError):
            return
        kind = type(error)
        is_listed = issubclass(kind, self.classes)
        if is_listed or (TokenizersError in self.classes and _is_from_rust(kind)):
            # These have readable messages; a KeyError, for example, only holds the key.
            readable = kind is Exception or issubclass(kind, OSError | ValueError | TemplateError)
            name = "" if readable else f"{kind.__name__}: "
            raise self.error(f"{self.message} ({name}{error_text(error)}).") from error


def _is_from_rust(kind: type[BaseException]) -> bool:
    """Whether tokenizers raised this: bare `Exception`s, and panics, which no module exports."""
    is_panic = kind.__module__ == "pyo3_runtime" and kind.__name__ == "PanicException"
    return kind is Exception or is_panic


def read_json(path: str | Path, error: type[DFlashError] = ConfigError) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises `error` if the path is not a file (a folder, a pipe, a dangling link), or if the file is
    unreadable, larger than 64 MiB, not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        size = check_file(path, error)
        if size > MAX_JSON_BYTES:
            raise error(f"{path}: {size:,} bytes are too many for such a file.")
        content = parse_json(Path(path).read_bytes(), path, error)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}).") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: a JSON object is expected, not {brief(content)}.")
    return content


def parse_json(
    content: bytes | str, path: str | Path, error: type[DFlashError] = ConfigError
) -> Any:
    """Parse a JSON text. `path` is for the message. Raises `error`."""
    try:
        return json.loads(content if isinstance(content, str) else content.decode(UTF8))
    except RecursionError as cause:
        raise error(f"{path}: not valid JSON (nested too deeply).") from cause
    except ValueError as cause:  # includes a wrong encoding
        raise error(f"{path}: not valid JSON ({error_text(cause)}).") from cause


def check_file(path: str | Path, error: type[DFlashError] = ConfigError) -> int:
    """Return the size of an ordinary file in bytes.

    Raises `error` for a folder, a pipe or a device, and `OSError` as `Path.stat` does.
    """
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path}: a file is expected, not a folder, a pipe or a device.")
    return status.st_size


def path_kind(path: str | Path) -> Literal["file", "folder", "other"] | None:
    """Return what is at a path, or None if nothing is. "other" is a device or a pipe.

    Raises `OSError` if that cannot be found out: the path is too long, needs permission, or is a
    loop of links. `Path.exists`, `is_dir` and `is_file` return False for such paths from Python
    3.14 on, as if a file could be created there.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def user_path(name: str | Path) -> Path:
    """Make a path of what a person typed; ~ is a home folder.

    The ~ of an unknown user stays as it is, where `Path.expanduser` would raise `RuntimeError`.
    """
    return Path(os.path.expanduser(name))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model's config about text, which models with vision nest."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def is_integer(value: Any, least: int = 1, most: float = MAX_INT32) -> bool:
    """Whether a value is an integer from `least` to `most`, perhaps numpy's; not a bool or 4.0."""
    integer = isinstance(value, Integral) and type(value) is not bool
    return integer and least <= int(value) <= most


def is_message(value: Any) -> bool:
    """Whether a value is a chat message: {"role": str, "content": str}."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that fits into a float: not NaN, infinite or too large."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return is_finite(value) and value > 0


def check_integer(name: str, value: Any, least: int = 1, most: int = MAX_INT32) -> int:
    """Return an integer setting, possibly numpy's, as Python's int. Raises `SettingsError`."""
    if not is_integer(value, least, most):
        bounds = f"from {least:,} to {most:,}"
        raise SettingsError(f"{name} must be a whole number {bounds}, not {brief(value)}.")
    return int(value)


def check_type(name: str, value: Any, kind: Any, example: str) -> None:
    """Raise `SettingsError` unless a value is None or an instance of `kind` (not a class).

    Args:
        name: the setting.
        value: its value.
        kind: a class, a runtime protocol, or a union of them.
        example: a call that makes an instance, for the message.
    """
    if value is not None and (isinstance(value, type) or not isinstance(value, kind)):
        raise SettingsError(f"{name} must be None or {example}, not {brief(value)}.")


def brief(value: Any) -> str:
    """Show a value in an error message, cut to 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _MAX_REPR else f"{text[: _MAX_REPR - 4]} ..."


def error_text(error: BaseException) -> str:
    """Return another library's message in one line, 200 characters at most, without a final dot."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > _MAX_REASON:
        text = f"{text[: _MAX_REASON - 4]} ..."
    return text.rstrip(".")
