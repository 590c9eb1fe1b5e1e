"""`dflash-mlx chat`: a conversation on a terminal, or with the lines of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from dflash_mlx.errors import PromptError
from dflash_mlx.loading.registry import EMBEDDED
from dflash_mlx.validation import UTF8, ErrorWrapper, user_path

from . import options
from .chat_commands import read_conversation, run_command
from .chat_conversation import Chat, LocalModel, ServedModel
from .early_typing import ignore_typing
from .generate import check_text
from .options import DECODING, MODEL, option
from .output import counted, note
from .pair import note_toy, open_pair, published

SAVED = "Continue a conversation saved with /save."
HINT = "/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves."  # shown at the start


def chat(
    context: typer.Context,
    *,
    names: options.Names,
    drafting: options.Drafting,
    weights: options.Weights,
    server: str | None = option(
        None,
        panel=MODEL,
        metavar="URL",
        help="Talk to a running server instead.",
    ),
    api_key: str | None = option(
        None,
        panel=MODEL,
        metavar="KEY",
        help="The key for --server.",
    ),
    settings: dict[str, Any] = options.settings(max_tokens=options.MAX_TOKENS),
    system: str | None = options.SYSTEM,
    resume: Path | None = option(None, panel=DECODING, metavar="FILE", help=SAVED),
    verbose: bool = options.VERBOSE,
) -> None:
    """Chat with a model. In a pipe, each line is a message and stdout has only the answers."""
    if system is not None:
        check_text(system, "The system message")
    messages = [] if resume is None else read_conversation(user_path(resume))
    typed_settings = dict(settings)
    model: LocalModel | ServedModel
    read_line = None
    with ignore_typing():
        if server is not None:
            model = ServedModel(server, None if names.model == EMBEDDED else names.model, api_key)
        else:
            pair = open_pair(names, weights, drafting=drafting, settings=settings)
            model = LocalModel(pair)
            note_toy(context)
            settings |= published(pair.target, options.given(context))
        options.note_without_effect({**typed_settings, "temperature": settings["temperature"]})
        conversation = Chat(model, settings=settings, messages=messages, verbose=verbose)
        if conversation.interactive:
            from .chat_input import line_reader

            read_line = line_reader()
    if system is not None:
        conversation.set_system(system)
    lines = _piped_lines() if read_line is None else _typed_lines(conversation, read_line)
    is_typed = sys.stdin.isatty()
    for line in lines:
        if not line.strip():
            continue
        # Lines of a pipe are never commands, because they may be any text.
        is_command = is_typed and run_command(conversation, line)
        if not is_command:
            conversation.ask(line)
        if conversation.leaving:
            break


def _piped_lines() -> Iterator[str]:
    """Yield the lines of stdin."""
    for line in iter(sys.stdin.buffer.readline, b""):
        with ErrorWrapper(PromptError, "The input is not UTF-8 text", (UnicodeError,)):
            text = line.decode(UTF8)
        yield text.rstrip("\n")


def _typed_lines(chat: Chat, read_line: Callable[[], str]) -> Iterator[str]:
    """Yield the messages that a person types, until they leave."""
    note(f"{chat.model.title}\n{HINT}")
    if chat.messages:
        note(f"{counted(len(chat.messages), 'message')} so far.")
    while True:
        try:
            yield read_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            note("Ctrl-D or /quit leaves.")
