"""An answer's text split into text, reasoning and tool calls while it streams.

mlx-lm's `TextStateMachine` finds the markers, in text and not in tokens, so that a step may bring
several markers or half of one. The text of a call is held back until the call ends. It becomes a
call, or stays text if it does not parse as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from .request import Tool
from .tools import NotACallError, ToolCall, ToolSyntax

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
_NEWLINE: Final = "\n"


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


Part = Text | Reasoning | ToolCall


@dataclass(frozen=True)
class _Markers:
    """The attributes of a tokenizer that `make_text_state_machine` reads."""

    has_thinking: bool
    think_start: str
    think_end: str
    has_tool_calling: bool
    tool_call_start: str
    tool_call_end: str
    structural_markers: Sequence[str]
    response_transitions: dict[str, list[tuple[str, str]]]


class AnswerParser:
    """Splits one answer into parts.

    Args:
        tokenizer: mlx-lm's, of the target.
        syntax: how the model writes calls.
        tools: the tools that may be called; without any, nothing is a call.
        starts_in_reasoning: whether the prompt ends where reasoning starts.
        parallel: whether more than one call is allowed.

    Attributes:
        calls: the number of calls so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        syntax: ToolSyntax,
        tools: Sequence[Tool],
        starts_in_reasoning: bool,
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
        initial = tokenizer.response_initial_state or NORMAL
        self._state = REASONING if starts_in_reasoning else initial
        self._machine = make_text_state_machine(markers).make_state(self._state)
        self._syntax, self._tools, self._parallel = syntax, tools, parallel
        self._call_text = ""  # of a call that has not ended
        self._newlines = ""  # held back: dropped if a marker follows
        self._after_marker = starts_in_reasoning
        self.calls = 0

    def feed(self, text: str) -> list[Part]:
        """The parts of the next text of the answer."""
        self._machine, segments = TextStateMachine.split(self._machine, text)
        return self._read(segments)

    def finish(self, truncated: bool) -> list[Part]:
        """The rest of the parts; `truncated` if `max_tokens` ended the answer."""
        self._machine, rest, _ = TextStateMachine.flush(self._machine)
        parts = self._read([(self._state, rest)])
        if self._state == TOOL:
            parts += self._end_call("", complete=not truncated or not self._syntax.end)
        return merge_texts(parts)

    def _read(self, segments: Sequence[tuple[str, str]]) -> list[Part]:
        parts: list[Part] = []
        for state, text in segments:
            if state != self._state:
                if self._state == TOOL:
                    parts += self._end_call(self._syntax.end)
                self._newlines, self._after_marker = "", True
                self._state = state
            if state == TOOL:
                self._call_text += text
            else:
                parts += self._read_text(state, text)
        return merge_texts(parts)

    def _read_text(self, state: str, text: str) -> list[Part]:
        """Text or reasoning, without the newlines beside markers."""
        if self._after_marker:
            text = text.lstrip(_NEWLINE)
        if not text:
            return []
        self._after_marker = False
        text, self._newlines = self._newlines + text, ""
        if state != REASONING:
            return [Text(text)]
        stripped = text.rstrip(_NEWLINE)
        self._newlines = text[len(stripped) :]
        return [Reasoning(stripped)] if stripped else []

    def _end_call(self, end: str, complete: bool = True) -> list[Part]:
        """The call whose text has ended, with the marker `end`; text if it is not a call."""
        body, self._call_text = self._call_text, ""
        calls: list[ToolCall] = []
        if complete:
            try:
                calls = self._syntax.parse(body, self._tools)
            except NotACallError:
                calls = []
        elif self.calls:
            return []  # truncated after a complete call: of no use to the client
        if not calls:
            return [Text(self._syntax.start + body + end)]
        if not self._parallel:
            calls = calls[: 1 - self.calls]
        self.calls += len(calls)
        return [*calls]


def merge_texts(parts: Sequence[Part]) -> list[Part]:
    """The parts, with neighbours of one kind merged."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text | Reasoning) and type(last) is type(part):
            merged[-1] = type(part)(last.text + part.text)
        else:
            merged.append(part)
    return merged
