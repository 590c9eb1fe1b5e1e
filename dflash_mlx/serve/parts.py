"""An answer's text, as it comes, in its parts: reasoning, text, calls of tools.

The borders are found by mlx-lm's `TextStateMachine`, in text and not in tokens, so a round may
bring several of them at once or half of one. What stands between the markers of a call is held back
until they close, and comes as a call, or, if it is none, as the text that it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from .ask import Tool
from .tools import Call, NotACallError, Syntax

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
_BREAK: Final = "\n"


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


Part = Text | Reasoning | Call


@dataclass(frozen=True)
class _Markers:
    """What `make_text_state_machine` reads of a tokenizer."""

    has_thinking: bool
    think_start: str
    think_end: str
    has_tool_calling: bool
    tool_call_start: str
    tool_call_end: str
    structural_markers: Sequence[str]
    response_transitions: dict[str, list[tuple[str, str]]]


class Splitter:
    """One answer's parts.

    Args:
        tokenizer: mlx-lm's, of the target.
        syntax: of calls.
        tools: that may be called; without any, what looks like a call is text.
        thinking: whether the prompt ends where the model's reasoning starts.
        parallel: whether there may be a second call.
    """

    def __init__(
        self,
        tokenizer: Any,
        syntax: Syntax,
        tools: Sequence[Tool],
        thinking: bool,
        parallel: bool = True,
    ) -> None:
        markers = _Markers(
            tokenizer.has_thinking,
            tokenizer.think_start,
            tokenizer.think_end,
            bool(tools),
            syntax.start,
            syntax.end,
            tokenizer.structural_markers,
            tokenizer.response_transitions if tools or not syntax.native else {},
        )
        initial = REASONING if thinking else tokenizer.response_initial_state or NORMAL
        self._machine = make_text_state_machine(markers).make_state(initial)
        self._syntax, self._tools, self._parallel = syntax, tools, parallel
        self._state = initial
        self._body = ""  # of a call that has not closed
        self._breaks = ""  # line breaks whose place is not known yet
        self._bare = thinking  # before the first character of what follows a marker
        self.calls = 0

    def feed(self, text: str) -> list[Part]:
        """The parts that a round's text makes certain."""
        self._machine, segments = TextStateMachine.split(self._machine, text)
        return self._take(segments)

    def finish(self, cut: bool) -> list[Part]:
        """What is left at the end; `cut` when the limit of tokens was reached."""
        self._machine, rest, _ = TextStateMachine.flush(self._machine)
        parts = self._take([(self._state, rest)])
        if self._state == TOOL:
            parts += self._close("", readable=not cut or not self._syntax.end)
        self._breaks = ""
        return joined(parts)

    def _take(self, segments: Sequence[tuple[str, str]]) -> list[Part]:
        parts: list[Part] = []
        for state, text in segments:
            if state != self._state:
                if self._state == TOOL:
                    parts += self._close(self._syntax.end)
                self._breaks, self._bare = "", True
                self._state = state
            if state == TOOL:
                self._body += text
            else:
                parts += self._show(state, text)
        return joined(parts)

    def _show(self, state: str, text: str) -> list[Part]:
        """Text or reasoning, without the line breaks between it and a marker."""
        if self._bare:
            text = text.lstrip(_BREAK)
        if not text:
            return []
        self._bare = False
        text = self._breaks + text
        self._breaks = ""
        if state == REASONING:
            shown = text.rstrip(_BREAK)
            self._breaks = text[len(shown) :]
            return [Reasoning(shown)] if shown else []
        return [Text(text)]

    def _close(self, end: str, readable: bool = True) -> list[Part]:
        """What a call is, now that it has ended, with this marker."""
        body, self._body = self._body, ""
        try:
            calls = self._syntax.read(body, self._tools) if readable else []
        except NotACallError:
            calls = []
        if not calls and not readable and self.calls:
            return []  # the limit cut a further call off: nobody can use it
        if not calls:
            return [Text(self._syntax.start + body + end)]
        if not self._parallel:
            calls = calls[: 1 - self.calls]
        self.calls += len(calls)
        return [*calls]


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring texts in one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text | Reasoning) and type(last) is type(part):
            joined[-1] = type(part)(last.text + part.text)
        else:
            joined.append(part)
    return joined
