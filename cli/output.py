"""Files that a command writes: whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_mlx.errors import OutputError


def as_line(content: dict[str, Any]) -> str:
    """The JSON object of `--json`, as it stands in a file."""
    return json.dumps(content, ensure_ascii=False) + "\n"


def as_text(answer: str) -> str:
    """An answer as it stands on stdout: its last line is a whole one."""
    return answer if not answer or answer.endswith("\n") else answer + "\n"


def check_writable(path: Path, read: Sequence[Path] = ()) -> None:
    """Refuse a path that cannot be written to, or is one that is read, before any work.

    Raises `OutputError`.
    """
    try:
        if path.is_dir():
            empty = ", as an empty name is" if path == Path() else ""
            raise OutputError(f"{path} is a folder{empty}: give --output a file.")
        if path.resolve() in [one.resolve() for one in read]:
            raise OutputError(f"{path} is read, too: choose another --output.")
        if _is_stream(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is not a file: choose another --output.")
        # Permissions alone would not tell of a disk that is mounted for reading only.
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise OutputError.because(path, error) from error


def _is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, as /dev/null and a shell's >(...) are."""
    return path.is_char_device() or path.is_fifo()


def write(path: Path, text: str) -> None:
    """Write the text to a device or a pipe, or else as `write_whole`. Raises `OutputError`."""
    if not _is_stream(path):
        write_whole(path, text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError.because(path, error) from error


def write_whole(path: Path, text: str) -> None:
    """Write the text beside `path` and move it there: a failure leaves what was there before.

    A file that is replaced hands on its permissions; what is none, as a device or a pipe, is not
    replaced. Raises `OutputError`, with nothing left behind.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        raise OutputError(f"{path} is not a file: choose another name.")
    partial = place.with_name(f".unfinished-{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            if place.exists():
                shutil.copymode(place, partial)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())  # some disks say only now that they are full
        os.replace(partial, place)
    except OSError as error:
        raise OutputError.because(path, error) from error
    finally:
        with suppress(OSError):  # it was moved, or never was
            partial.unlink()
