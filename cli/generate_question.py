"""The prompt of `generate`: an argument, a file or stdin, and never two of them."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from dflash_mlx.errors import PromptError


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt given, a file's text, or all of stdin ("-" asks for it, too).

    Raises:
        typer.BadParameter: two prompts, or none and nobody has piped one in.
        PromptError: the text is empty or not UTF-8, or the file cannot be read.
    """
    if file is not None and prompt is not None:
        raise typer.BadParameter("goes without a PROMPT", param_hint="--file")
    if file is not None:
        try:
            return utf8(file.read_bytes(), str(file))
        except OSError as error:
            raise PromptError(f"{file}: cannot be read ({error.strerror}).") from error
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give some text, or pipe it in", param_hint="PROMPT")
    return utf8(sys.stdin.buffer.read() if prompt in (None, "-") else prompt)


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
