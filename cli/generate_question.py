"""What `generate` asks: an argument, a file and what is piped in, as one prompt; and a schema."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from dflash_mlx.errors import DataError, MissingDependencyError, PromptError
from dflash_mlx.validation import read_json

from .output import counted, note

STANDARD = "-"  # a file of this name is stdin, or stdout


def read_prompt(prompt: str | None, files: Sequence[Path], stdin_ends: bool = True) -> str:
    """The prompt given, the files' texts and what is piped in, in this order.

    A blank line stands between them, as between an instruction and the letter it is about. The
    newline that ends a file or what is piped in is none of the question's, as in a shell's $(...).
    "-" as the prompt or a file is stdin, in its place; else stdin is read unless it is a terminal,
    or one that never ends. On a terminal it is said that it was added: in a loop over the lines
    of a file, the first call takes them all.

    Raises:
        typer.BadParameter: stdin is asked for twice or never ends, or there is no prompt at all.
        PromptError: the text is empty or not UTF-8.
        DataError: a file cannot be read.
    """
    asked = [prompt, *map(str, files)].count(STANDARD)
    if asked > 1:
        raise typer.BadParameter(f"{STANDARD} is stdin, and is read once", param_hint="--file")
    if asked and not stdin_ends:
        raise typer.BadParameter("mlx.launch never ends stdin: give a text or a --file")
    parts = [] if prompt is None else [_stdin() if prompt == STANDARD else utf8(prompt)]
    for file in files:
        parts.append(_stdin() if str(file) == STANDARD else _lines(_content(file), str(file)))
    if not asked and stdin_ends and sys.stdin is not None and not sys.stdin.isatty():
        piped = sys.stdin.buffer.read()
        if piped.strip() and parts and sys.stderr.isatty():
            note(f"With {counted(len(piped.splitlines()), 'line')} of standard input.")
        if piped.strip() or not parts:
            parts.append(_lines(piped, "What is piped in"))
    if not parts:
        raise typer.BadParameter("give some text, or pipe it in", param_hint="PROMPT")
    return parts[0] if len(parts) == 1 else "\n\n".join(part.strip("\n") for part in parts)


def _stdin() -> str:
    return _lines(b"" if sys.stdin is None else sys.stdin.buffer.read(), "What stdin holds")


def _lines(content: bytes, name: str) -> str:
    """As `utf8`, without the newline that ends the last line."""
    return utf8(content, name).removesuffix("\n").removesuffix("\r")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}).") from error


def utf8(content: str | bytes, name: str = "The prompt") -> str:
    """The content as text of at least one visible character. Raises `PromptError`."""
    try:
        # An argument may hold bytes that are no text.
        text = content.encode().decode() if isinstance(content, str) else content.decode()
    except UnicodeError as error:
        raise PromptError(f"{name} is not text in UTF-8.") from error
    if not text.strip():
        raise PromptError(f"{name} is empty: give some text.")
    return text


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """The prompt as a chat, behind a system message if there is one. Raises `PromptError`."""
    asked = [{"role": "user", "content": text}]
    if system is not None:
        asked.insert(0, {"role": "system", "content": utf8(system, "The system message")})
    return asked


def read_schema(file: Path | None) -> dict[str, Any] | None:
    """The JSON schema in a file, before any model is loaded.

    Raises: `DataError` for a file that holds none, `BadParameter`, `MissingDependencyError`.
    """
    if file is None:
        return None
    if str(file) == STANDARD:
        raise typer.BadParameter("is a file: stdin is for the prompt", param_hint="--json-schema")
    schema = read_json(file, DataError)
    if find_spec("llguidance") is None:
        raise MissingDependencyError.of("--json-schema needs llguidance", "structured")
    return schema
