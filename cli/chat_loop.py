"""The turns of a chat: read a line, obey it or answer it, say how that went."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import TYPE_CHECKING

from dflash_mlx.errors import PromptError

from .chat_dialogue import Answer, Dialogue, measure_plain
from .chat_writer import Writer, ribbon
from .pair import explain
from .screen import error_line, note, waiting

if TYPE_CHECKING:
    from dflash_mlx import Event

PROMPT, MORE = ">>> ", "... "
HINT = '/help lists the commands, """ begins several lines, Ctrl-C stops an answer, Ctrl-D leaves'
LONG = 512  # new tokens of a prompt whose reading is worth a word


class Chat:
    """A person, or a pipe, and a dialogue.

    Args:
        dialogue: the messages and what answers them.
        obey: carries out a line that is a command, and says whether it was one.
        verbose: whether to say how wide the rounds of an answer were, and why.

    Attributes:
        interactive: whether a person is there; a pipe gets the answers alone on stdout.
        ribbon: whether every answer's rounds are drawn.
        plain: measured tokens per second of plain decoding; None where it was not.
    """

    def __init__(
        self, dialogue: Dialogue, obey: Callable[[Chat, str], bool], verbose: bool = False
    ) -> None:
        self.dialogue, self.verbose, self._obey = dialogue, verbose, obey
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.ribbon, self.leaving = False, False
        self.plain: float | None = None

    def run(self) -> None:
        """Take turns until the person leaves. Raises `PromptError` in a pipe only."""
        pair = self.dialogue.pair
        if pair.drafter is not None:
            with waiting("Measuring plain decoding, to compare with"):
                self.plain = measure_plain(pair)
        if self.interactive:
            import readline  # noqa: F401  gives input() its line editing and history

            note(f"{pair.title}\n{HINT}")
        while not self.leaving and (line := self._read()) is not None:
            if line.strip() and not self._obey(self, line.strip()):
                self.take_turn(line)

    def take_turn(self, line: str) -> None:
        """Answer a message."""
        try:
            answer = self.dialogue.ask(line)
        except PromptError as error:  # the conversation has outgrown the context
            if not self.interactive:
                raise
            error_line(f"{error} /clear starts a new conversation.")
            return
        self.show(answer)

    def show(self, answer: Answer) -> None:
        """Write an answer as it comes, and a line about it; Ctrl-C stops it."""
        writer = self._writer(answer)
        events = self.dialogue.stream(answer)
        try:
            with _interruptible(answer, self.interactive):
                for event in self._first_awaited(events, answer):
                    writer.write(event.text)
                    if answer.stopped:
                        break
        except PromptError as error:
            if not self.interactive:
                raise
            self.dialogue.undo()
            error_line(f"{error} /clear starts a new conversation.")
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
        note(self._status(answer))
        if self.ribbon:
            note(ribbon(answer.stats.accepted_per_round, answer.stats.block_size - 1))
        if self.verbose:
            explain(self.dialogue.pair, answer.stats)

    def _writer(self, answer: Answer) -> Writer:
        tokenizer = self.dialogue.pair.target.tokenizer
        if not getattr(tokenizer, "has_thinking", False):
            return Writer(None)
        tags = tokenizer.think_start, tokenizer.think_end
        begun = tokenizer.decode(answer.prompt[-8:]).rstrip().endswith(tags[0])
        return Writer(tags, thinking=begun, styled=self.interactive)

    def _first_awaited(self, events: Generator[Event], answer: Answer) -> Iterator[Event]:
        """The events; while a long prompt is read, the screen says so."""
        new = len(answer.prompt) - self.dialogue.held(answer)
        with waiting(f"Reading {new:,} tokens", quiet=new < LONG):
            first = next(events, None)
        return chain([first], events) if first is not None else events

    def _status(self, answer: Answer) -> str:
        """One line about an answer."""
        stats, pair = answer.events[-1].stats, self.dialogue.pair
        parts = [f"{stats.output_tokens} tokens", f"{stats.tokens_per_second:,.0f} tok/s"]
        if self.plain:
            parts.append(f"{stats.tokens_per_second / self.plain:.1f}x plain")
        if pair.drafter is not None:
            parts.append(f"{stats.acceptance_length:.1f} tokens per round")
        if answer.stopped:
            parts.append("stopped")
        elif answer.events[-1].finish_reason == "length":
            parts.append(pair.limit_reached(stats))
        if pair.drafter is not None:
            (rows, _), *_ = stats.widths.most_common(1)
            shape = "a tree of" if stats.trees[rows] else "rows:"
            parts.append(f"mostly {shape} {rows}" if rows > 1 else "mostly not drafting")
        new = stats.prompt_tokens - stats.reused_tokens
        parts.append(f"prompt: {new} new, {stats.reused_tokens} kept")
        return " · ".join(parts)

    def _read(self) -> str | None:
        """The next message; None when there are no more."""
        if not self.interactive:
            try:
                line = sys.stdin.buffer.readline().decode()
            except UnicodeError as error:
                raise PromptError("The input is not text in UTF-8.") from error
            return line.rstrip("\n") if line else None
        try:
            return _read_lines()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            note("Ctrl-D or /quit leaves.")
            return ""
        except UnicodeError:
            error_line("That was not text in UTF-8.")
            return ""


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


def _read_lines() -> str:
    """A message: a line, the next ones too after a backslash, or all between triple quotes."""
    line = input(PROMPT)
    if line.startswith('"""'):
        lines = [line[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(input(MORE))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip("\n")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input(MORE)}"
    return line
