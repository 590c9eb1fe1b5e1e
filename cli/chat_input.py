"""Reads a person's messages, with a history, completion, and several lines per message."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.shortcuts import CompleteStyle

from dflash_mlx.machine.facts import cache_folder

from .chat_commands import COMMANDS, NUMBERS
from .output import note

QUOTES = '"""'


class CommandCompleter(Completer):
    """Completes commands, file names after /save and /load, and settings after /set."""

    def __init__(self) -> None:
        self._commands = WordCompleter(list(COMMANDS), sentence=True)
        files = PathCompleter(expanduser=True)
        settings = WordCompleter(list(NUMBERS))
        self._arguments = {"/save": files, "/load": files, "/set": settings}

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Yield how the text before the cursor may continue."""
        name, space, argument = document.text_before_cursor.partition(" ")
        completer = self._arguments.get(name) if space else self._commands
        if completer is not None:
            yield from completer.get_completions(Document(argument if space else name), event)


def line_reader() -> Callable[[], str]:
    """Return a function that reads a message; Ctrl-X Ctrl-E edits it in $VISUAL or $EDITOR.

    It raises `EOFError` for Ctrl-D and `KeyboardInterrupt` for Ctrl-C.
    """
    # Pasted text is one message, because the terminal marks it. Completions appear below the line,
    # because a menu would not fit into narrow terminals.
    session: PromptSession[str] = PromptSession(
        history=_open_history(),
        completer=CommandCompleter(),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        enable_open_in_editor=True,
        multiline=Condition(lambda: is_unfinished(get_app().current_buffer.text)),
        prompt_continuation="... ",
    )
    return lambda: joined(session.prompt(">>> "))


def is_unfinished(text: str) -> bool:
    """Whether Enter begins another line: after a backslash, or inside triple quotes."""
    if text.startswith(QUOTES):
        return not text[len(QUOTES) :].rstrip().endswith(QUOTES)
    return text.endswith("\\")


def joined(text: str) -> str:
    """Remove the quotes or backslashes that join the lines of a message."""
    if text.startswith(QUOTES):
        return text.strip().removeprefix(QUOTES).removesuffix(QUOTES)
    return text.replace("\\\n", "\n")


def _open_history() -> History:
    """Open the file of earlier messages, which only its owner can read.

    If that fails, the history is kept in memory.
    """
    path = cache_folder("chat") / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("a"):
            return FileHistory(path)
    except OSError as error:
        note(f"The history of this chat is not kept: {path}: {error.strerror}.")
        return InMemoryHistory()
