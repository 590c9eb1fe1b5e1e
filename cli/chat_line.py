"""A person's line: editing, history over sessions, completion, pasted blocks, and an editor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.shortcuts import CompleteStyle

from .screen import note

PROMPT, MORE = ">>> ", "... "


class KeptHistory(FileHistory):
    """The lines of this session and of those before, in a file that only its owner can read.

    Where the file cannot be used, that is said once, and lines are kept until the chat ends.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path, self._kept = path, True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
        except OSError as error:
            self._give_up(error)

    def load_history_strings(self) -> Iterable[str]:
        """The lines of earlier sessions, the last one first."""
        if not self._kept:
            return []
        try:
            return super().load_history_strings()
        except OSError as error:
            self._give_up(error)
            return []

    def store_string(self, string: str) -> None:
        """Keep a line."""
        if self._kept:
            try:
                super().store_string(string)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._kept = False
        note(f"No history of what you type is kept: {self._path}: {error.strerror}.")


class Completions(Completer):
    """Completes commands, and what comes after one.

    Args:
        commands: every command, and what completes its argument.
    """

    def __init__(self, commands: Mapping[str, Completer | None]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """What the text before the cursor may go on with."""
        name, space, argument = document.text_before_cursor.partition(" ")
        if not space:
            for command in self._commands:
                if name.startswith("/") and command.startswith(name):
                    yield Completion(command, start_position=-len(name))
        elif completer := self._commands.get(name):
            yield from completer.get_completions(Document(argument), event)


class Line:
    """Reads what a person types.

    Args:
        history: the file of what was typed before.
        commands: see `Completions`.
    """

    def __init__(self, history: Path, commands: Mapping[str, Completer | None]) -> None:
        # A paste that the terminal marks as one goes into the buffer with its newlines: it is one
        # message. Completions are listed below the line, as a menu would not fit narrow terminals.
        self._session: PromptSession[str] = PromptSession(
            history=KeptHistory(history),
            completer=Completions(commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            prompt_continuation=MORE,
            tempfile_suffix=".md",
        )

    def read(self, draft: str | None = None) -> str:
        """A message: a line, the next ones too after a backslash, or all between triple quotes.

        Args:
            draft: text to begin with, opened in the person's editor. VISUAL and EDITOR say which
                that is, the one thing that a chat takes from the environment: it is where every
                program looks, and not a setting of ours.

        Raises `EOFError` for Ctrl-D, `KeyboardInterrupt`, and `UnicodeError` for what is no text.
        """
        if draft is None:
            line = self._session.prompt(PROMPT)
        else:
            line = self._session.prompt(PROMPT, default=draft, pre_run=self._open_editor)
        if line.startswith('"""'):
            lines = [line[3:]]
            while not lines[-1].rstrip().endswith('"""'):
                lines.append(self._session.prompt(MORE))
            lines[-1] = lines[-1].rstrip()[:-3]
            line = "\n".join(lines)
        else:
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{self._session.prompt(MORE)}"
        line.encode()  # bytes that are no text come as lone surrogates
        return line.strip("\n")

    def _open_editor(self) -> None:
        self._session.default_buffer.open_in_editor()
