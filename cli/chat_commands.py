"""What a chat obeys instead of answering: a table of commands, from which /help is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_mlx.errors import DataError, OutputError

from .chat_loop import Chat
from .screen import error_line, note, stderr, waiting

Command = Callable[[Chat, str], None]


def obey(chat: Chat, line: str) -> bool:
    """Carry out a line that is a command; whether it was one."""
    name, _, argument = line.partition(" ")
    if name in COMMANDS:
        COMMANDS[name][1](chat, argument.strip())
        return True
    if chat.interactive and name.startswith("/") and not argument and "/" not in name[1:]:
        note(f"There is no {name}: /help lists the commands.")
        return True
    return False


def _help(chat: Chat, _: str) -> None:
    for name, (text, _command) in COMMANDS.items():
        note(f"{name:10}{text}")


def _quit(chat: Chat, _: str) -> None:
    chat.leaving = True


def _clear(chat: Chat, _: str) -> None:
    chat.dialogue.clear()
    note("The conversation is forgotten.")


def _undo(chat: Chat, _: str) -> None:
    undone = chat.dialogue.undo()
    note("The last question and its answer are forgotten." if undone else "Nothing to undo.")


def _retry(chat: Chat, _: str) -> None:
    answer = chat.dialogue.retry()
    if answer is None:
        note("There is no question yet.")
        return
    if chat.dialogue.settings["seed"] is None:
        note("Without --temperature the same question has the same answer.")
    chat.show(answer)


def _system(chat: Chat, text: str) -> None:
    chat.dialogue.set_system(text)
    note("The system message is set." if text else "There is no system message now.")


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
    try:
        chat.dialogue.load(Path(name).expanduser())
    except DataError as error:
        error_line(str(error))
        return
    note(f"{len(chat.dialogue.messages)} messages loaded.")


def _ribbon(chat: Chat, _: str) -> None:
    chat.ribbon = not chat.ribbon
    on = "A bar for each round follows every answer; a full one kept the whole draft."
    note(on if chat.ribbon else "No ribbon any more.")


def _stats(chat: Chat, _: str) -> None:
    all_stats = [answer.stats for answer in chat.dialogue.answers if answer.stats is not None]
    if not all_stats:
        note("There is no answer yet.")
        return
    tokens, rounds = (sum(getattr(s, n) for s in all_stats) for n in ("output_tokens", "rounds"))
    seconds = sum(stats.decode_seconds for stats in all_stats)
    reused = sum(stats.reused_tokens for stats in all_stats)
    read = sum(stats.prompt_tokens for stats in all_stats) - reused
    note(f"answers    {len(all_stats)}, {tokens} tokens in {seconds:.2f} s")
    note(f"speed      {tokens / seconds:,.0f} tok/s, {tokens / rounds:.1f} tokens per round")
    if chat.plain:
        note(f"plain      {chat.plain:,.0f} tok/s, measured when the chat began")
    note(f"prompts    {read} tokens read, {reused} kept from earlier turns")
    note(f"memory     {max(stats.peak_bytes for stats in all_stats) / 1e6:,.0f} MB at most")


def _compare(chat: Chat, _: str) -> None:
    answer = chat.dialogue.last
    if answer is None or answer.stats is None:
        note("There is no answer to compare with.")
        return
    with waiting("Decoding plainly"):
        plain = chat.dialogue.compare(answer)
    ours, theirs = answer.stats, plain.stats
    for name, stats in (("drafted", ours), ("plain", theirs)):
        note(f"{name:8}{stats.decode_seconds:7.2f} s  {stats.tokens_per_second:7,.0f} tok/s")
    speedup = theirs.decode_seconds / ours.decode_seconds
    same = plain.tokens == answer.tokens
    verdict = "[green]identical[/]" if same else "[red]not identical[/]"
    stderr().print(f"{speedup:.2f}x, the text is {verdict}", soft_wrap=True)


COMMANDS: dict[str, tuple[str, Command]] = {
    "/help": ("this list", _help),
    "/clear": ("forget the conversation, but not the system message", _clear),
    "/undo": ("forget the last question and its answer", _undo),
    "/retry": ("answer the last question again, with another seed", _retry),
    "/system": ("TEXT: say how to answer; without TEXT, no longer", _system),
    "/compare": ("decode the last answer plainly as well: times, and the same text?", _compare),
    "/ribbon": ("draw how many drafts every round kept, or stop it", _ribbon),
    "/stats": ("what all answers took", _stats),
    "/save": ("FILE: write the conversation", _save),
    "/load": ("FILE: go on with a saved conversation", _load),
    "/quit": ("leave, like Ctrl-D", _quit),
}
