"""An answer of gpt-oss in its parts: its channels are reasoning, text and calls.

Written after OpenAI's description of the format ("harmony"). Their own parser, `openai-harmony`,
fetches its vocabulary from the network when it is first used; the tokenizer here has it already,
and what is left to do is to read headers.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mlx_lm.generate import TextStateMachine

from ..errors import DFlashError
from ..validation import ErrorWrapper
from .ask import Tool
from .body import parse_object
from .parts import Part, Reasoning, Text, joined
from .tools import Call, NotACallError, Syntax, checked_call

NAME: Final = "harmony"
_TOKENS: Final = frozenset({"<|channel|>", "<|message|>", "<|call|>", "<|start|>", "<|end|>"})
_HEADER, _BODY = "header", "body"
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]+)")
_MACHINE: Final = {
    _HEADER: [("<|message|>", _BODY)],
    _BODY: [("<|end|>", _HEADER), ("<|call|>", _HEADER), ("<|return|>", _HEADER)],
}


def speaks_harmony(tokenizer: Any) -> bool:
    """Whether a tokenizer is one of gpt-oss."""
    return _TOKENS <= set(tokenizer.get_vocab())


def syntax() -> Syntax:
    """Its calls, which have a channel and no markers."""
    return Syntax(NAME, "", "", _read, native=True)


def _read(body: str, tools: Any) -> Any:
    """Arguments alone; the name is in the header."""
    return {"arguments": parse_object(body.encode())}


def with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as its template has it, which knows reasoning before calls alone."""
    said = dict(message)
    thought = said.pop("reasoning_content", None)
    if thought and not said["content"] and "tool_calls" in said:
        said["thinking"] = thought
    return said


def reasoning_tokens(tokens: Sequence[int], tokenizer: Any) -> int:
    """How many tokens of an answer are the model's reasoning, their headers and markers included.

    Args:
        tokens: of the answer, which begins in a header.
        tokenizer: mlx-lm's, of gpt-oss.
    """
    message = tokenizer.convert_tokens_to_ids("<|message|>")
    ends = tokenizer.convert_tokens_to_ids([marker for marker, _ in _MACHINE[_BODY]])
    counted, begins, thinks = 0, 0, False
    for at, token in enumerate(tokens):
        if token == message:
            header = tokenizer.decode(list(tokens[begins:at]))
            channel = _CHANNEL.search(header)
            thinks = channel is not None and channel[1] == "analysis" and "to=" not in header
        if token in ends or at == len(tokens) - 1:
            counted += (at + 1 - begins) * thinks
            begins, thinks = at + 1, False
    return counted


class HarmonySplitter:
    """One answer's parts; as `parts.Splitter`.

    Args:
        tools: that may be called.
        parallel: whether there may be a second call.
    """

    def __init__(self, tools: Sequence[Tool], parallel: bool = True) -> None:
        self._machine = TextStateMachine(_MACHINE).make_state(_HEADER)
        self._tools, self._parallel = tools, parallel
        self._state, self._header, self._body = _HEADER, "", ""
        self.calls = 0

    def feed(self, text: str) -> list[Part]:
        """The parts that a round's text makes certain."""
        self._machine, segments = TextStateMachine.split(self._machine, text)
        return joined([part for state, piece in segments for part in self._take(state, piece)])

    def finish(self, cut: bool) -> list[Part]:
        """What is left at the end; `cut` when the limit of tokens was reached."""
        self._machine, rest, _ = TextStateMachine.flush(self._machine)
        parts = self._take(self._state, rest)
        if self._state == _BODY and self._recipient is not None:
            parts += self._close(readable=not cut)
        return joined(parts)

    def _take(self, state: str, text: str) -> list[Part]:
        parts: list[Part] = []
        if state != self._state:
            if state == _HEADER:
                if self._recipient is not None:
                    parts += self._close()
                self._header = self._body = ""
            self._state = state
        if state == _HEADER:
            self._header += text
        elif self._recipient is not None:
            self._body += text
        elif text:
            channel = _CHANNEL.search(self._header)
            thinks = channel is not None and channel[1] == "analysis"
            parts.append(Reasoning(text) if thinks else Text(text))
        return parts

    @property
    def _recipient(self) -> str | None:
        """The function that the message is for; None of one for people."""
        found = _RECIPIENT.search(self._header)
        return None if found is None or not self._tools else found[1]

    def _close(self, readable: bool = True) -> list[Part]:
        """A message to a function has ended."""
        body, self._body = self._body, ""
        call: Call | None = None
        if readable:
            try:
                with ErrorWrapper(NotACallError, "not a call"):
                    read: Any = _read(body, None)
                call = checked_call({"name": self._recipient, **read}, self._tools)
            except DFlashError:
                call = None
        if call is None:
            return [Text(f"{self._header}<|message|>{body}")]
        if self.calls and not self._parallel:
            return []
        self.calls += 1
        return [call]
