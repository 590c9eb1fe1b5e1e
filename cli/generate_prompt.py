"""What `generate` asks: an argument, files and piped text as one prompt; and a JSON schema."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.errors import DataError, PromptError
from dflash_mlx.validation import UTF8, parse_json, read_json

from .options import DECODING, option
from .output import counted, note

STDIN = "-"  # a file of this name is stdin, or stdout

Prompt = Annotated[
    str | None, typer.Argument(help="The prompt. Piped text follows it; '-' puts it here.")
]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="Add a file to the prompt; '-' is stdin. Repeatable."
    ),
]
System = Annotated[str | None, option(DECODING, "TEXT", "A system message.")]


def read_prompt(prompt: str | None, files: Sequence[Path], stdin_ends: bool = True) -> str:
    """The prompt, the files and what is piped in, in this order, with blank lines between them.

    "-" as the prompt or a file puts stdin there. Otherwise stdin is read unless it is a terminal
    or never ends. A note on a terminal says that it was read: in a shell loop over the lines of a
    file, the first call takes them all.

    Raises:
        typer.BadParameter: stdin is asked for twice or never ends, or there is no prompt.
        PromptError: the text is empty or not UTF-8.
        DataError: a file cannot be read.
    """
    sources = ([] if prompt is None else [prompt]) + [str(file) for file in files]
    dashes = sources.count(STDIN)
    if dashes > 1:
        raise typer.BadParameter(f"{STDIN} is stdin and can be read only once", param_hint="--file")
    if dashes and not stdin_ends:
        raise typer.BadParameter("mlx.launch never ends stdin: give a text or a --file")
    parts = [] if prompt in (None, STDIN) else [check_text(str(prompt))]
    if prompt == STDIN:
        parts.append(_decoded(sys.stdin.buffer.read(), "stdin"))
    for file in files:
        parts.append(
            _decoded(sys.stdin.buffer.read() if str(file) == STDIN else _content(file), str(file))
        )
    if not dashes and stdin_ends and not sys.stdin.isatty():
        piped = sys.stdin.buffer.read()
        if piped.strip() and parts and sys.stderr.isatty():
            note(f"With {counted(len(piped.splitlines()), 'line')} of standard input.")
        if piped.strip() or not parts:
            parts.append(_decoded(piped, "The piped text"))
    if not parts:
        raise typer.BadParameter("give some text, or pipe it in", param_hint="PROMPT")
    return parts[0] if len(parts) == 1 else "\n\n".join(part.strip("\n") for part in parts)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}).") from error


def _decoded(content: bytes, name: str) -> str:
    """The text without its last newline, as in a shell's $(...). Raises `PromptError`."""
    try:
        text = content.decode(UTF8)
    except UnicodeError as error:
        raise PromptError(f"{name} is not UTF-8 text.") from error
    return check_text(text, name).removesuffix("\n").removesuffix("\r")


def check_text(text: str, name: str = "The prompt") -> str:
    """The text itself. Raises `PromptError` if it is empty, or bytes that are no text."""
    try:
        text.encode()
    except UnicodeError as error:
        raise PromptError(f"{name} is not UTF-8 text.") from error
    if not text.strip():
        raise PromptError(f"{name} is empty: give some text.")
    return text


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    """The prompt as a chat, after a system message if there is one. Raises `PromptError`."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": check_text(system, "The system message")})
    return messages


def read_schema(given: str | None) -> Any:
    """The JSON schema in a file, or given itself. Raises `DataError` for one that is none."""
    if given is None or not given.lstrip().startswith("{"):
        return given and read_json(given, DataError)
    return parse_json(given, "--json-schema", DataError)
