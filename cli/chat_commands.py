"""What a chat obeys instead of answering: a table of commands, from which /help is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

from dflash_mlx.errors import DataError, OutputError, SettingsError
from dflash_mlx.machine.folders import cache_folder

from .chat_loop import Chat
from .chat_settings import NAMES, NONE, change, idle, shown
from .options import say_idle
from .output import counted, error_line, note, stderr, waiting

if TYPE_CHECKING:
    from .chat_line import Line

COMMAND = re.compile(r"(/(?:[a-zA-Z]+|\?))(?=\s|$)")  # "/usr/bin/env: what is it?" is a question
LEAVING = ("exit", "quit")  # as a message: what other programs at a prompt end on
ELSEWHERE = {"/?": "/help", "/h": "/help", "/bye": "/quit", "/q": "/quit"}  # as other programs say
QUOTES = '"""'  # `chat_line.Line` reads them
LAST = 60  # characters that are shown of a conversation that is loaded
FILE, SETTING, WORDS = "file", "setting", "words"  # kinds of arguments


def obey(chat: Chat, line: str) -> bool:
    """Carry out a line that is a command; whether it was one, or looked too much like it.

    A message that begins with a space is never one.
    """
    if line.rstrip() in LEAVING:
        line = f"/{line}"
    found = COMMAND.match(line)
    if found is None:
        return False
    name, rest = ELSEWHERE.get(found[1], found[1]), line[found.end() :]
    if "\n" in rest and name != "/system":  # something pasted
        return False
    if name in COMMANDS:
        if rest.strip() and not COMMANDS[name].argument:
            note(f"{name} stands alone. (With a space before it, it is a message.)")
        else:
            COMMANDS[name].run(chat, rest.strip())
        return True
    if name[1:] in NAMES:
        near = [f"/set {name[1:]}"]
    else:
        near = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else "/help lists the commands."
    note(f"There is no {name}: {hint} (With a space before it, it is a message.)")
    return True


def reader() -> Line:
    """What reads a person's lines; it knows the commands and keeps a history."""
    from prompt_toolkit.completion import Completer, PathCompleter, WordCompleter

    from .chat_line import Line

    completers: dict[str, Completer] = {
        FILE: PathCompleter(expanduser=True),
        SETTING: WordCompleter(list(NAMES)),
    }
    arguments = {name: completers.get(c.argument) for name, c in COMMANDS.items()}
    return Line(cache_folder("chat") / "history", arguments)


def _help(chat: Chat, _: str) -> None:
    for name, command in COMMANDS.items():
        if name == "/compare" and not chat.dialogue.compares:
            continue
        note(f"{name:10}{command.help}")
    note(f"{QUOTES:10}around a message of several lines; or a \\ where each goes on")


def _quit(chat: Chat, _: str) -> None:
    chat.leaving = True


def _clear(chat: Chat, _: str) -> None:
    chat.dialogue.clear()
    note("The conversation is forgotten.")


def _undo(chat: Chat, _: str) -> None:
    if chat.dialogue.unload():
        note("Back in the conversation that was there before /load.")
        return
    undone = chat.dialogue.undo()
    note("The last question and its answer are forgotten." if undone else "Nothing to undo.")


def _retry(chat: Chat, _: str) -> None:
    if not chat.dialogue.was_asked:
        note("There is no question yet.")
        return
    if not chat.dialogue.settings["temperature"]:
        note("At temperature 0 the same question has the same answer.")
    chat.answer(chat.dialogue.retry)


def _system(chat: Chat, text: str) -> None:
    if not text:
        note(chat.dialogue.system or "There is no system message: /system TEXT sets one.")
        return
    chat.dialogue.set_system("" if text == NONE else text)
    note("There is no system message now." if text == NONE else "The system message is set.")


def _set(chat: Chat, text: str) -> None:
    text = text.removeprefix("parameter ")  # as other programs have it
    name, _, value = text.replace("=", " ", 1).partition(" ")
    name = name.removeprefix("--").replace("-", "_").lower()  # as on the command line
    settings = chat.dialogue.settings
    try:
        if value or name not in ("", *NAMES):
            change(settings, name, value.strip(), chat.dialogue.vocabulary)
    except SettingsError as error:
        error_line(str(error))
        return
    if value and idle(settings, name):
        say_idle(name)
    for line in shown(settings):
        if not name or line.split()[0] == name:
            note(line)


def _edit(chat: Chat, text: str) -> None:
    from .chat_line import edited

    chat.draft = text
    try:
        chat.draft = edited(text)
    except SettingsError as error:
        error_line(str(error))


def _save(chat: Chat, name: str) -> None:
    if not name:
        error_line("/save needs a file's name.")
        return
    try:
        chat.dialogue.save(Path(name).expanduser())
    except OutputError as error:
        error_line(str(error))
        return
    note(f"Saved in {name}.")


def _load(chat: Chat, name: str) -> None:
    if not name:
        error_line("/load needs a file's name.")
        return
    before = len(chat.dialogue.messages)
    try:
        chat.dialogue.load(Path(name).expanduser())
    except DataError as error:
        error_line(str(error))
        return
    loaded = chat.dialogue.messages
    there = counted(before, "message")
    back = f" /undo goes back to the {there} from before." if before else ""
    note(f"{counted(len(loaded), 'message')} loaded.{back}")
    if loaded:
        note(f"The last one: {shorten(loaded[-1]['content'], LAST, placeholder=' ...')}")


def _ribbon(chat: Chat, _: str) -> None:
    chat.ribbon = not chat.ribbon
    on = "A bar for each round follows every answer; a full one kept the whole draft."
    note(on if chat.ribbon else "No ribbon any more.")


def _stats(chat: Chat, _: str) -> None:
    all_stats = [answer.stats for answer in chat.dialogue.answers if answer.stats is not None]
    if not all_stats:
        note("There is no answer yet.")
        return
    tokens = sum(stats.output_tokens for stats in all_stats)
    timed = [stats for stats in all_stats if stats.decode_seconds]
    of_rounds, rounds = (sum(getattr(s, n) for s in timed) for n in ("round_tokens", "rounds"))
    seconds = sum(stats.decode_seconds for stats in timed)
    reused = sum(stats.reused_tokens for stats in all_stats)
    read = sum(stats.prompt_tokens for stats in all_stats) - reused
    note(f"answers    {len(all_stats)}, {counted(tokens, 'token')} in {seconds:.2f} s")
    if rounds:
        speed = f"{of_rounds / seconds:,.0f} tok/s, {of_rounds / rounds:.1f} tokens per round"
        note(f"speed      {speed}")
    if chat.plain:
        note(f"plain      ~{chat.plain:,.0f} tok/s, measured now and then")
    note(f"prompts    {counted(read, 'token')} read, {reused} kept from earlier turns")
    if peak := max(stats.peak_bytes for stats in all_stats):
        note(f"memory     {peak / 1e6:,.0f} MB at most")


def _compare(chat: Chat, _: str) -> None:
    answer = chat.dialogue.last
    if answer is None or answer.stats is None:
        note("There is no answer to compare with.")
        return
    try:
        with waiting("Decoding plainly"):
            plain = chat.dialogue.compare(answer)
    except SettingsError as error:
        error_line(str(error))
        return
    ours, theirs = answer.stats, plain.stats
    told = "no round to time"  # the first token comes of reading the prompt
    if ours.rounds and theirs.rounds:
        for name, stats in (("drafted", ours), ("plain", theirs)):
            note(f"{name:8}{stats.decode_seconds:7.2f} s  {stats.tokens_per_second:7,.0f} tok/s")
        told = f"~{theirs.decode_seconds / ours.decode_seconds:.2f}x"  # not side by side
        chat.plain = theirs.tokens_per_second  # of a whole answer: better than any estimate
    verdict = "[green]identical[/]" if plain.tokens == answer.tokens else "[red]not identical[/]"
    stderr().print(f"{told}, the text is {verdict}", soft_wrap=True)


class Command(NamedTuple):
    """What a command does, in words and in deed, and of which kind its argument is, if any."""

    help: str
    run: Callable[[Chat, str], None]
    argument: str = ""


COMMANDS: dict[str, Command] = {
    "/help": Command("this list", _help),
    "/clear": Command("forget the conversation, but not the system message", _clear),
    "/undo": Command("forget the last question and its answer", _undo),
    "/retry": Command("answer the last question again, with another seed", _retry),
    "/edit": Command("write in your editor; TEXT begins the message, Enter sends it", _edit, WORDS),
    "/system": Command(f"show the system message; TEXT sets, {NONE!r} removes it", _system, WORDS),
    "/set": Command("show the settings; NAME VALUE changes one, as temperature 0.8", _set, SETTING),
    "/compare": Command("decode the last answer plainly: times, and the same text?", _compare),
    "/ribbon": Command("draw how many drafts every round kept, or stop it", _ribbon),
    "/stats": Command("what all answers took", _stats),
    "/save": Command("FILE: write the conversation", _save, FILE),
    "/load": Command("FILE: go on with a saved conversation", _load, FILE),
    "/quit": Command("leave, like /exit, Ctrl-D and the word quit or exit alone", _quit),
    "/exit": Command("the same", _quit),
}
