"""The turns of a chat: read a line, obey it or answer it, say how that went."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING

from dflash_mlx.errors import DFlashError, PromptError

from .chat_dialogue import Answer, Dialogue, measure_plain
from .chat_wrap import BETWEEN, packed
from .chat_writer import ASCII_BARS, BARS, ROUNDS, Writer, ribbon, terminal_size
from .counters import drafting
from .output import MIN_STEPS, counted, error_line, note, stderr, waiting
from .pair import explain

if TYPE_CHECKING:
    from dflash_mlx import Event, Stats

    from .chat_line import Line

HINT = "/help lists the commands, Tab completes them, Ctrl-C stops an answer, Ctrl-D leaves"
LONG = 512  # new tokens of a prompt whose reading is worth a word
PLAIN_EVERY = 4  # answers between two measurements of plain decoding


class Chat:
    """A person, or a pipe, and a dialogue.

    Args:
        dialogue: the messages and what answers them.
        obey: carries out a line that is a command, and says whether it was one.
        reader: makes what reads a person's lines.
        verbose: whether to say how wide the rounds of an answer were, and why.

    Attributes:
        interactive: whether a person is there; a pipe gets the answers alone on stdout.
        ribbon: whether every answer's rounds are drawn.
        plain: tokens per second of plain decoding, as last measured; None where it was not.
        draft: what the next line of a person begins with.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        obey: Callable[[Chat, str], bool],
        reader: Callable[[], Line],
        verbose: bool = False,
    ) -> None:
        self.dialogue, self.verbose = dialogue, verbose
        self._obey, self._reader = obey, reader
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.draft = ""
        self.ribbon, self.leaving = False, False
        self.plain: float | None = None

    def run(self) -> None:
        """Take turns until the person leaves. Raises `DFlashError` in a pipe only."""
        read: Callable[[], str | None] = self._read_piped
        if self.interactive:
            note(f"{self.dialogue.pair.title}\n{HINT}")
            if messages := self.dialogue.messages:
                note(f"{counted(len(messages), 'message')} so far.")
            read = partial(self._read_typed, self._reader())
        typed = sys.stdin.isatty()  # what a program sends may begin with anything
        while not self.leaving and (line := read()) is not None:
            if line.strip() and not (typed and self._obey(self, line)):
                self.take_turn(line)

    def take_turn(self, line: str) -> None:
        """Answer a message."""
        self.answer(partial(self.dialogue.ask, line))

    def answer(self, begin: Callable[[], Answer]) -> None:
        """Have a turn of the dialogue begin; where it does not fit, the conversation goes on."""
        try:
            answer = begin()
        except PromptError as error:  # the conversation has outgrown the context
            if not self.interactive:
                raise
            error_line(f"{error} /clear starts a new conversation.")
            return
        self._show(answer)

    def _show(self, answer: Answer) -> None:
        """Write an answer as it comes, and a line about it; Ctrl-C stops it."""
        writer = self._writer(answer)
        events = self.dialogue.stream(answer)
        try:
            with _unseen_keys(), _interruptible(answer, self.interactive):
                for event in self._first_awaited(events, answer):
                    writer.write(event.text)
                    if answer.stopped:
                        break
        except DFlashError as error:
            if not self.interactive:
                raise
            self.dialogue.take_back()
            further = " /clear starts a new conversation." * isinstance(error, PromptError)
            error_line(f"{error}{further}")
            return
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            answer.stopped = True
        finally:
            events.close()
        writer.end()
        if answer.stats is None:
            return
        if chains := self.dialogue.pair.chains:
            chains.keep()
        self._measure_plain()
        self._say_how(answer)
        if self.verbose:
            explain(self.dialogue.pair, answer.stats)

    def _writer(self, answer: Answer) -> Writer:
        tags, begun = self.dialogue.thinking(answer)
        plain = stderr().is_dumb_terminal
        size = terminal_size if sys.stdout.isatty() and not plain else None
        if tags is None:
            return Writer(None, size=size)
        return Writer(tags, thinking=begun, styled=self.interactive and not plain, size=size)

    def _first_awaited(self, events: Generator[Event], answer: Answer) -> Iterator[Event]:
        """The events; while a long prompt is read, the screen says so."""
        new = len(answer.prompt) - self.dialogue.held(answer)
        with waiting(f"Reading {new:,} tokens", quiet=new < LONG):
            first = next(events, None)
        return chain([first], events) if first is not None else events

    def _measure_plain(self) -> None:
        """Measure plain decoding after the first answer, and after every few.

        As the machine is now, warm or busy with other things; on a short text, where plain decoding
        is as fast as it gets.
        """
        pair = self.dialogue.pair
        if pair.drafter is None or (len(self.dialogue.answers) - 1) % PLAIN_EVERY:
            return
        try:
            with waiting("Measuring plain decoding, to compare with"):
                self.plain = measure_plain(pair)
        except KeyboardInterrupt:  # the answer is complete: only its comparison is not
            if not self.interactive:
                raise

    def _say_how(self, answer: Answer) -> None:
        """What an answer took, in lines that fit the terminal."""
        stats, console = answer.events[-1].stats, stderr()
        parts = self._status(answer, stats)
        for line in packed(parts, console.width) if console.is_terminal else [BETWEEN.join(parts)]:
            note(line)
        if self.ribbon:
            bars = ASCII_BARS if console.options.ascii_only else BARS
            rounds = min(ROUNDS, console.width - len("..."))
            note(ribbon(stats.accepted_per_round, stats.block_size - 1, rounds, bars))

    def _status(self, answer: Answer, stats: Stats) -> list[str]:
        """The parts of the line about an answer."""
        pair = self.dialogue.pair
        parts = [counted(stats.output_tokens, "token")]
        if stats.decode_seconds:
            parts.append(f"{stats.tokens_per_second:,.0f} tok/s")
        if self.plain and stats.rounds >= MIN_STEPS:
            parts.append(f"~{stats.tokens_per_second / self.plain:.1f}x plain")
        if pair.drafter is not None:
            parts.append(f"{stats.acceptance_length:.1f} tokens per round")
        if answer.stopped:
            parts.append("stopped")
        elif answer.events[-1].finish_reason == "length":
            parts.append(pair.limit_reached(stats))
        if pair.drafter is not None and stats.rounds:
            parts.append(drafting(stats))
        new = stats.prompt_tokens - stats.reused_tokens
        return [*parts, f"prompt: {new} new, {stats.reused_tokens} kept"]

    def _read_piped(self) -> str | None:
        """The next line of stdin; None when there are no more."""
        try:
            line = sys.stdin.buffer.readline().decode()
        except UnicodeError as error:
            raise PromptError("The input is not text in UTF-8.") from error
        return line.rstrip("\n") if line else None

    def _read_typed(self, lines: Line) -> str | None:
        """The next message of a person; None when there are no more."""
        draft, self.draft = self.draft, ""
        try:
            return lines.read(draft)
        except EOFError:
            return None
        except KeyboardInterrupt:
            note("Ctrl-D or /quit leaves.")
        except UnicodeError:
            error_line("That was not text in UTF-8.")
        return ""


@contextmanager
def _unseen_keys() -> Iterator[None]:
    """Have the terminal show no keys, which would tear an answer; the next prompt shows them."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = termios.tcgetattr(terminal)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def _interruptible(answer: Answer, interactive: bool) -> Iterator[None]:
    """Have Ctrl-C stop an answer between two rounds, so that the caches stay whole.

    Before the first round, and the second time, it interrupts whatever runs.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        if answer.stopped or not answer.events:
            raise KeyboardInterrupt
        answer.stopped = True

    if not interactive:
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
