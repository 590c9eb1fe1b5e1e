"""A person's line: editing, history over sessions, completion, pasted blocks, and an editor."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.shortcuts import CompleteStyle

from dflash_mlx.errors import SettingsError

from .output import note

PROMPT, MORE = ">>> ", "... "


class KeptHistory(FileHistory):
    """The messages of this session and of those before, in a file that only its owner can read.

    Where the file cannot be used, that is said once, and they are kept until the chat ends.
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
        """The messages of earlier sessions, the last one first."""
        if not self._kept:
            return []
        try:
            return super().load_history_strings()
        except OSError as error:
            self._give_up(error)
            return []

    def append_string(self, string: str) -> None:
        """Nothing: it is called for each line of a message, which `keep` keeps in one piece."""

    def keep(self, message: str) -> None:
        """Have the next prompts go back to a message, unless it is the last one's very text."""
        if message.strip() and self.get_strings()[-1:] != [message]:
            super().append_string(message)

    def store_string(self, string: str) -> None:
        """Write a message."""
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
        self._history = KeptHistory(history)
        # A paste that the terminal marks as one goes into the buffer with its newlines: it is one
        # message. Completions are listed below the line, as a menu would not fit narrow terminals.
        self._session: PromptSession[str] = PromptSession(
            history=self._history,
            completer=Completions(commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            prompt_continuation=MORE,
        )

    def read(self, draft: str = "") -> str:
        """A message: a line, the next ones too after a backslash, or all between triple quotes.

        Args:
            draft: text to begin with.

        Raises `EOFError` for Ctrl-D, `KeyboardInterrupt`, and `UnicodeError` for what is no text.
        """
        lines = [self._session.prompt(PROMPT, default=draft)]
        try:
            self._go_on(lines)
        finally:  # what is given up halfway, too, can be gone back to
            message = "\n".join(lines).strip("\n")
            message.encode()  # bytes that are no text come as lone surrogates
            self._history.keep(message)
        return message

    def _go_on(self, lines: list[str]) -> None:
        """Read the further lines of a message, and take off what said that there are some."""
        if lines[0].startswith('"""'):
            lines[0] = lines[0][3:]
            while not lines[-1].rstrip().endswith('"""'):
                lines.append(self._more())
            lines[-1] = lines[-1].rstrip()[:-3]
            return
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._more())

    def _more(self) -> str:
        """A further line of a message. Ctrl-D gives up that, as Ctrl-C does, and not the chat."""
        try:
            return self._session.prompt(MORE)
        except EOFError as error:
            raise KeyboardInterrupt from error


def edited(draft: str) -> str:
    """The draft as a person leaves it in the editor that VISUAL or else EDITOR names, or vi.

    Nothing else here reads the environment: these two are no settings of ours, but where a system
    keeps which editor its person likes.

    Raises `SettingsError` when the editor does not run, or leaves something that is no text.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "message.md"
            path.write_text(draft, encoding="utf-8")
            status = subprocess.call([*shlex.split(editor), str(path)])
            text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror
    except UnicodeError:
        reason = "what it wrote is not text in UTF-8"
    except ValueError as error:  # quotes that do not end
        reason = str(error)
    else:
        if status == 0:
            return text.strip("\n")
        reason = f"it ended with status {status}"
    raise SettingsError(f"{editor}: {reason}. VISUAL or EDITOR names the editor of /edit.")
