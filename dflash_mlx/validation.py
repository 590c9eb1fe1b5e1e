"""Checks of what comes from outside: files, settings, and the errors of other libraries.

A model folder may be damaged, or made to do damage. So only ordinary files are opened (a pipe would
block), their size is checked before they are read, and a number before it is used: Python's
integers have no bound, and `float` and `math.isfinite` raise for large ones.

Other libraries expect intact files, and raise errors of their own for damaged ones. An
`ErrorWrapper` goes around one call of one library, and names the classes that this call raises. It
never goes around a caller's function: what that raises comes out as it was raised.
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
PATH_ERRORS = (OSError, ValueError)  # of looking at a path: too long, no permission; with a NUL
_MAX_REPR = 60  # characters of a value in a message
_MAX_REASON = 200  # characters of another library's message in ours


class TokenizersError(Exception):
    """In `ErrorWrapper.classes`: a bare Exception, or a panic. tokenizers raises those."""


# Encoding a text, or making text of token ids: tokenizers' own, transformers' and mlx-lm's.
_COMMON = AttributeError, LookupError, OverflowError, TypeError, ValueError
TOKENIZER_ERRORS = (*_COMMON, TokenizersError)


@dataclass(frozen=True)
class ErrorWrapper(AbstractContextManager["ErrorWrapper", None]):
    """A context around one call of another library: its errors leave it as `error`.

    Attributes:
        error: the error to raise instead.
        message: what is wrong; the library's own reason follows in brackets.
        classes: what the call raises.
    """

    error: type[DFlashError]
    message: str
    classes: tuple[type[BaseException], ...]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise our error in place of a named one."""
        if error is None or isinstance(error, DFlashError):
            return
        kind = type(error)
        if issubclass(kind, self.classes) or (
            TokenizersError in self.classes and _is_from_rust(kind)
        ):
            # These have readable messages; a KeyError, for example, only holds the key.
            readable = kind is Exception or issubclass(kind, OSError | ValueError | TemplateError)
            name = "" if readable else f"{kind.__name__}: "
            raise self.error(f"{self.message} ({name}{error_text(error)}).") from error


def _is_from_rust(kind: type[BaseException]) -> bool:
    """Whether tokenizers raised this: bare `Exception`s, and panics, which no module exports."""
    return kind is Exception or (kind.__module__, kind.__name__) == (
        "pyo3_runtime",
        "PanicException",
    )


def read_json(path: str | Path, kind: type[DFlashError] = ConfigError) -> dict[str, Any]:
    """The JSON object in a file.

    Raises `kind`: not a file (a folder, a pipe, a dangling link), unreadable, larger than 64 MiB,
    not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        size = check_file(path, kind)
        if size > MAX_JSON_BYTES:
            raise kind(f"{path}: {size:,} bytes are more than a file of its kind has.")
        content = parse_json(Path(path).read_bytes(), path, kind)
    except OSError as error:
        raise kind(f"{path}: cannot be read ({error.strerror}).") from error
    if not isinstance(content, dict):
        raise kind(f"{path}: a JSON object is expected, not {brief(content)}.")
    return content


def parse_json(
    content: bytes | str, path: str | Path, kind: type[DFlashError] = ConfigError
) -> Any:
    """The value of a JSON text; `path` is for the message. Raises `kind`."""
    try:
        return json.loads(content if isinstance(content, str) else content.decode(UTF8))
    except RecursionError as error:
        raise kind(f"{path}: not valid JSON (nested too deeply).") from error
    except ValueError as error:  # includes a wrong encoding
        raise kind(f"{path}: not valid JSON ({error_text(error)}).") from error


def check_file(path: str | Path, kind: type[DFlashError] = ConfigError) -> int:
    """The size of an ordinary file in bytes. Raises `kind` for a folder or pipe, and `OSError`."""
    found = Path(path).stat()
    if not stat.S_ISREG(found.st_mode):
        raise kind(f"{path}: a file is expected, not a folder, a pipe or a device.")
    return found.st_size


def path_kind(path: str | Path) -> Literal["file", "folder", "other"] | None:
    """What is at a path; None if nothing is. "other" is a device or a pipe.

    Raises `OSError` for a path that cannot be looked at: too long, no permission, a loop of links.
    Where that matters, use this and not `Path.exists`, `is_dir` or `is_file`: from Python 3.14 on
    they answer False there, as if a file could be created.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def user_path(name: str | Path) -> Path:
    """A path that a person gave, ~ being a home folder. That of an unknown user stays as it is.

    `Path.expanduser` would raise `RuntimeError` for it.
    """
    return Path(os.path.expanduser(name))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a model's config about text; models with vision keep it in `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def is_integer(value: Any, least: int = 1, most: float = MAX_INT32) -> bool:
    """Whether a value is an integer (numpy's too, no bool, no 4.0) from `least` to `most`."""
    integer = isinstance(value, Integral) and type(value) is not bool
    return integer and least <= int(value) <= most


def is_message(value: Any) -> bool:
    """Whether a value is a chat message: {"role": str, "content": str}."""
    texts = [value.get("role"), value.get("content")] if isinstance(value, dict) else [None]
    return all(isinstance(text, str) for text in texts)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float holds: neither NaN nor infinite nor too large."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return is_finite(value) and value > 0


def check_integer(name: str, value: Any, least: int = 1, most: int = MAX_INT32) -> int:
    """A setting as Python's int, from numpy's too. Raises `SettingsError` if it is none."""
    if not is_integer(value, least, most):
        range_ = f"from {least:,} to {most:,}"
        raise SettingsError(f"{name} must be a whole number {range_}, not {brief(value)}.")
    return int(value)


def check_type(name: str, value: Any, kind: Any, example: str) -> None:
    """Raise `SettingsError` unless a value is None or an instance of `kind` (not a class).

    Args:
        name: of the setting.
        value: as given.
        kind: a class, a runtime protocol, or a union of them.
        example: a call that makes one, for the message.
    """
    if value is not None and (isinstance(value, type) or not isinstance(value, kind)):
        raise SettingsError(f"{name} must be None or {example}, not {brief(value)}.")


def brief(value: Any) -> str:
    """A value for a message, cut to 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _MAX_REPR else f"{text[: _MAX_REPR - 4]} ..."


def error_text(error: BaseException) -> str:
    """Another library's message in one line, cut to 200 characters, without the full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 4]} ...").rstrip(".")
