"""The commands of a chat, in a table that /help prints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_mlx.errors import DataError, DFlashError, SettingsError
from dflash_mlx.settings import SETTINGS
from dflash_mlx.validation import is_message, read_json, user_path

from .options import CONVERSATION_SETTINGS, note_without_effect
from .output import counted, error_line, note, write_file
from .pair import template_variables

if TYPE_CHECKING:
    from .chat_conversation import Chat, Messages

COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)
ROLES = ("system", "user", "assistant")
THINKING = ("on", "off", *SETTINGS["reasoning_effort"].choices)
FILE = "FILE"  # the argument of a command that needs a file name
NO_SYSTEM = "none"  # the argument of /system that removes the message
# Commands of other programs -> ours.
FOREIGN_COMMANDS = {
    "exit": "/quit",
    "quit": "/quit",
    "/exit": "/quit",
    "/bye": "/quit",
    "/reset": "/clear",
    "/new": "/clear",
}
# The settings that /set can change.
NUMBERS = [
    name
    for name, setting in SETTINGS.items()
    if setting.metavar and setting.kind in (int, float) and name not in CONVERSATION_SETTINGS
]


def run_command(chat: Chat, line: str) -> bool:
    """Run a line if it is a command. Returns False for a message.

    A message that begins with a space is never a command, and neither is "/usr/bin/env: what?".
    """
    line = line.rstrip()
    match = COMMAND.fullmatch(FOREIGN_COMMANDS.get(line, line))
    if match is None:
        return False
    name = match[1]
    argument = (match[2] or "").strip()
    if name not in COMMANDS:
        hint = _suggest(name, list(COMMANDS)) or "/help lists the commands."
        note(f"There is no {name}. {hint} (To send it as a message, type a space first.)")
        return True
    try:
        if COMMANDS[name].argument == FILE and not argument:
            raise SettingsError(f"{name} needs a file name.")
        COMMANDS[name].run(chat, argument)
    except DFlashError as error:
        error_line(str(error))
    return True


def _suggest(name: str, names: list[str]) -> str:
    """Return a question with the most similar name; empty if none is similar."""
    similar = get_close_matches(name, names, n=1)
    return f"Did you mean {similar[0]}?" if similar else ""


def _help(chat: Chat, _: str) -> None:
    for name, command in COMMANDS.items():
        usage = f"{name} {command.argument}"
        note(f"{usage:20}{command.help}")
    quotes = '"""'
    note(f"{quotes:20}around a message of several lines; or end lines with a \\")


def _clear(chat: Chat, _: str) -> None:
    chat.messages = [message for message in chat.messages if message["role"] == "system"]
    note("The conversation is cleared.")


def _undo(chat: Chat, _: str) -> None:
    if chat.last_question is None:
        note("There is nothing to undo.")
        return
    chat.messages = chat.messages[: chat.last_question]
    note("The last question and its answer are removed.")


def _retry(chat: Chat, _: str) -> None:
    if chat.last_question is None:
        note("There is no question yet.")
        return
    if not chat.settings["temperature"] and not chat.stopped:
        note("The temperature is 0, so the answer is the same: /set temperature 0.8 changes that.")
    if chat.settings["seed"] is not None:
        chat.settings["seed"] = (chat.settings["seed"] + 1) % 2**32
    chat.answer(chat.messages[: chat.last_question + 1])


def _system(chat: Chat, text: str) -> None:
    if not text:
        note(chat.system or "There is no system message: /system TEXT sets one.")
        return
    if text == NO_SYSTEM:
        chat.set_system("")
        note("The system message is removed.")
    else:
        chat.set_system(text)
        note("The system message is set.")


def _set(chat: Chat, text: str) -> None:
    name, _, value = re.sub(r"(?<=[a-z])-", "_", text).replace("=", " ", 1).partition(" ")
    for number in NUMBERS:
        if name in SETTINGS[number].aliases:
            name = number
    if name and name not in NUMBERS:
        hint = _suggest(name, NUMBERS) or f"The settings: {', '.join(NUMBERS)}."
        raise SettingsError(f"There is no setting {name!r}. {hint}")
    if value:
        changed = {name: SETTINGS[name].parse(name, value.strip())}
        chat.change(changed)
        note_without_effect({**changed, "temperature": chat.settings["temperature"]}, str)
    shown = [name] if name else NUMBERS
    for number in shown:
        note(f"{number:18} {chat.settings[number]}")


def _think(chat: Chat, text: str) -> None:
    if text and text not in THINKING:
        raise SettingsError(f"/think takes {', '.join(THINKING)}, not {text!r}.")
    if text:
        effort = None if text in ("on", "off") else text
        chat.change({"think": text != "off", "reasoning_effort": effort})
        if chat.model.pair is not None:
            # Warns if the chat template has no such switch.
            template_variables(chat.model.pair.target, chat.settings)
        else:
            note("The setting is sent to the server; its model may have no such switch.")
    states = {None: "the model's default", True: "on", False: "off"}
    state = states[chat.settings.get("think")]
    note(f"thinking: {chat.settings.get('reasoning_effort') or state}")


def _save(chat: Chat, name: str) -> None:
    path = user_path(name)
    if os.path.isfile(path):
        saved = read_conversation(path)
        if saved != chat.messages[: len(saved)]:
            raise SettingsError(f"{name} holds another conversation: choose another name.")
    content = {"model": chat.model.name, "messages": chat.messages}
    write_file(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    note(f"Saved in {name}.")


def _load(chat: Chat, name: str) -> None:
    chat.messages = read_conversation(user_path(name))
    note(f"{counted(len(chat.messages), 'message')} loaded.")


def read_conversation(path: Path) -> Messages:
    """Read the messages from a file that /save wrote. Raises `DataError`."""
    messages: Any = read_json(path, DataError).get("messages")
    is_valid = isinstance(messages, list) and all(map(is_message, messages))
    if not is_valid or any(message["role"] not in ROLES for message in messages):
        raise DataError(f"{path} is not a saved conversation: it has no list of messages.")
    return messages


def _quit(chat: Chat, _: str) -> None:
    chat.leaving = True


class Command(NamedTuple):
    """A command: its argument, its help, and the function that runs it."""

    argument: str
    help: str
    run: Callable[[Chat, str], None]


COMMANDS: dict[str, Command] = {
    "/help": Command("", "show this list", _help),
    "/clear": Command("", "forget the conversation, but not the system message", _clear),
    "/undo": Command("", "remove the last question and its answer", _undo),
    "/retry": Command("", "answer the last question again, with another seed", _retry),
    "/system": Command("[TEXT]", "show or set the system message; 'none' removes it", _system),
    "/set": Command("[NAME VALUE]", "show or change settings: /set temperature 0.8", _set),
    "/think": Command(
        "[on|off|HOW]", "think before answering, or not; HOW: low, medium or high", _think
    ),
    "/save": Command(FILE, "save the conversation", _save),
    "/load": Command(FILE, "continue a saved conversation", _load),
    "/quit": Command("", "leave, like Ctrl-D", _quit),
}
