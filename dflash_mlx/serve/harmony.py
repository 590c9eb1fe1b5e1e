"""Answers of gpt-oss in the harmony format, whose channels are reasoning, text and calls.

Written after OpenAI's description of the format. Their parser, `openai-harmony`, downloads its
vocabulary when it is first used; here mlx-lm's tokenizer has it.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mlx_lm.generate import TextStateMachine

from .parts import Part, Reasoning, Text, merge_texts
from .request import Tool
from .tools import NotACallError, ToolCall, ToolSyntax, check_call

NAME: Final = "harmony"
_TOKENS: Final = frozenset({"<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>"})
_HEADER, _BODY = "header", "body"
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]+)")
_TRANSITIONS: Final = {
    _HEADER: [("<|message|>", _BODY)],
    _BODY: [("<|end|>", _HEADER), ("<|call|>", _HEADER), ("<|return|>", _HEADER)],
}


def uses_harmony(tokenizer: Any) -> bool:
    """Whether a tokenizer is gpt-oss's."""
    return _TOKENS <= set(tokenizer.get_vocab())


# Calls have a channel and no markers, and their name is in the header: `HarmonyParser` reads them.
SYNTAX: Final = ToolSyntax(NAME, "", "", lambda text, tools: None, native=True)


def with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as gpt-oss's template takes it, which has reasoning only before calls."""
    copy = dict(message)
    reasoning = copy.pop("reasoning_content", None)
    if reasoning and not copy["content"] and "tool_calls" in copy:
        copy["thinking"] = reasoning
    return copy


def _is_reasoning(header: str) -> bool:
    channel = _CHANNEL.search(header)
    return channel is not None and channel[1] == "analysis"


class HarmonyParser:
    """Splits one answer into parts, as `parts.AnswerParser` does.

    Args:
        tools: the tools that may be called.
        parallel: whether more than one call is allowed.

    Attributes:
        calls: the number of calls so far.
    """

    def __init__(self, tools: Sequence[Tool], parallel: bool = True) -> None:
        self._machine = TextStateMachine(_TRANSITIONS).make_state(_HEADER)
        self._tools, self._parallel = tools, parallel
        self._state, self._header, self._body = _HEADER, "", ""
        self.calls = 0

    def feed(self, text: str) -> list[Part]:
        """The parts of the next text of the answer."""
        self._machine, segments = TextStateMachine.split(self._machine, text)
        return merge_texts([part for state, piece in segments for part in self._read(state, piece)])

    def finish(self, truncated: bool) -> list[Part]:
        """The rest of the parts; `truncated` if `max_tokens` ended the answer."""
        self._machine, rest, _ = TextStateMachine.flush(self._machine)
        parts = self._read(self._state, rest)
        if self._state == _BODY and self._recipient is not None:
            parts += self._end_call(complete=not truncated)
        return merge_texts(parts)

    def _read(self, state: str, text: str) -> list[Part]:
        parts: list[Part] = []
        if state != self._state:
            if state == _HEADER:
                if self._recipient is not None:
                    parts += self._end_call()
                self._header = self._body = ""
            self._state = state
        if state == _HEADER:
            self._header += text
        elif self._recipient is not None:
            self._body += text
        elif text:
            parts.append(Reasoning(text) if _is_reasoning(self._header) else Text(text))
        return parts

    @property
    def _recipient(self) -> str | None:
        """The function that the message calls; None for other messages."""
        found = _RECIPIENT.search(self._header)
        return None if found is None or not self._tools else found[1]

    def _end_call(self, complete: bool = True) -> list[Part]:
        """The call whose message has ended; text if it is not a call."""
        body, self._body = self._body, ""
        call: ToolCall | None = None
        if complete:
            try:
                call = check_call({"name": self._recipient, "arguments": body}, self._tools)
            except NotACallError:
                call = None
        if call is None:
            return [Text(f"{self._header}<|message|>{body}")]
        if self.calls and not self._parallel:
            return []
        self.calls += 1
        return [call]
