"""An answer split into text, reasoning and calls while it streams.

Markers count where they are tokens of their own, if the vocabulary has them so: spelled in ordinary
tokens they are text. The text of a call is held back until the call ends. It becomes a call, or
stays text if it does not parse as one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ..events import Event
from ..stream import possible_start
from .calls import Call, Schemas, TaggedCalls, read_calls
from .families import AnswerFormat
from .marks import MARK, MarkedText
from .values import NotACallError, read_arguments, typed_arguments

NORMAL, REASONING, TOOL, HEADER = "normal", "reasoning", "tool", "header"  # what a text is
_BARE, _MESSAGE, _STRAY = "bare", "message", "stray"  # what else a marker may mean
_NEWLINE: Final = "\n"
_MAX_HEADER: Final = 200  # characters; more are text
_HEADER_WORDS: Final = re.compile(
    r"<\|start\|>|assistant|<\|channel\|>|(?<=<\|channel\|>)\s*(?:analysis|commentary|final)\b"
    r"|<\|constrain\|>\s*\w*|to=\S+"
)


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call: its id, the tool's name, and its arguments as JSON text."""

    id: str
    name: str
    arguments: str


Part = Text | Reasoning | ToolCall


class _Markers:
    """Markers by what each means, and a pattern for the first one of them in a text."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.kinds = {marker: kind for marker, kind in kinds.items() if marker}
        longest_first = sorted(self.kinds, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class AnswerParser:
    """Splits one answer into parts.

    Args:
        form: how the model answers.
        schemas: of the tools that may be called, by name; without any, nothing is a call.
        starts_in_reasoning: whether the prompt ends where reasoning starts.
        parallel: whether more than one call is allowed.
        detokenizer: a fresh one, as the engine uses one for the text. Without one, all markers
            count.
        forced: whether the answer must be a call; a call that is cut is dropped then.

    Attributes:
        calls: the number of calls so far.
        state: what the text at this place is.
    """

    def __init__(
        self,
        form: AnswerFormat,
        schemas: Schemas,
        starts_in_reasoning: bool = False,
        parallel: bool = True,
        detokenizer: Any = None,
        forced: bool = False,
    ) -> None:
        self._text = detokenizer and MarkedText(detokenizer, form.tokens)
        self._form, self._schemas, self._parallel = form, schemas, parallel
        self._forced = forced
        self.state = HEADER if form.header else REASONING if starts_in_reasoning else NORMAL
        self.calls = 0
        own = "|".join(map(re.escape, form.tokens.values()))
        self._own = re.compile(own or r"(?!)")
        self._markers = {one: self._markers_of(one) for one in (NORMAL, REASONING, HEADER)}
        [start], [end] = (self._marked({one: TOOL}) for one in (form.family.start, form.family.end))
        self._begins = re.compile(re.escape(start) or "(?!)")
        calls = form.family.calls
        self._tail, another = (
            (calls.tail, calls.beginning) if isinstance(calls, TaggedCalls) else ("", "(?!)")
        )
        self._between = re.compile(
            rf"((?:{re.escape(end)})?)\s*(?={self._begins.pattern}{another})"
        )
        self._pending = ""  # what may be a marker, a header or a call
        self._searched = 0  # no marker in it begins before this place
        self._start = self._name = ""  # of the call: what began it; its name, if a header has it
        self._is_bare, self._outer = False, NORMAL  # it began without its marker; in which text
        self._newlines = ""  # held back: dropped if a marker follows
        self._after_marker, self._begun = starts_in_reasoning, False
        self._answered = 0  # characters of the answer since the last marker
        self._given = 0  # characters of pending text that the prompt has already

    def begin(self, text: str) -> None:
        """Take the beginning of the answer that the prompt has: the answer is what follows it.

        A call that begins there is read whole.
        """
        self._pending = self._own.sub(rf"{MARK}\g<0>", text)  # a tokenizer makes tokens of them
        self._read()
        self.calls = 0
        self._newlines = ""
        if self.state != HEADER:
            start = self._start if self.state == TOOL and not self._is_bare else ""
            self._given = len((start + self._pending).replace(MARK, ""))

    def read(self, event: Event) -> list[Part]:
        """The parts that an event brings."""
        parts = self.feed(event.text, event.tokens)
        if event.finish_reason is not None:
            parts += self.finish(truncated=event.finish_reason == "length")
        return parts

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """The parts of the next text of the answer."""
        self._pending += self._text.add(text, tokens) if self._text else text
        return merge_texts(self._read())

    def answer_length(self, token: int, text: str) -> int:
        """How many of the last characters of the next token's text are the answer's.

        The others belong to thoughts, calls, markers, and the newlines beside them.
        """
        self.feed(text, [token])
        if self.state != NORMAL:
            return 0
        return min(len(text), self._answered + len(self._pending.replace(MARK, "")))

    def finish(self, truncated: bool) -> list[Part]:
        """The rest of the parts; `truncated` if `max_tokens` ended the answer."""
        parts = self._read(last=True)
        while self.state == TOOL:
            parts += self._end_answer(truncated)
            parts += self._read(last=True)
        if self.state == HEADER:
            parts += self._read_words(self._take(len(self._pending)))
        return merge_texts(parts)

    def _markers_of(self, state: str) -> _Markers:
        family, header, (opens, closes) = self._form.family, self._form.header, self._form.thought
        if header is not None:
            found = dict.fromkeys(header.ends, HEADER)
        else:
            found = {opens: REASONING, closes: NORMAL}
        if self._schemas:
            found[family.start] = TOOL
        if self._schemas and state == NORMAL:
            openings = [
                one.replace("{name}", name) for one in family.openings for name in self._schemas
            ]
            found |= {family.end: _STRAY} | dict.fromkeys(openings, _BARE)
        found |= dict.fromkeys(family.dropped, state)
        marked = self._marked(found)
        if header is not None and state == HEADER:  # spelled or not
            marked |= {header.message: _MESSAGE, MARK + header.message: _MESSAGE}
        return _Markers(marked)

    def _marked(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """Markers as they stand in marked text."""
        return {self._own.sub(rf"{MARK}\g<0>", one): kind for one, kind in kinds.items()}

    def _read(self, last: bool = False) -> list[Part]:
        """The parts of the pending text, except what may be the start of a marker."""
        parts: list[Part] = []
        while True:
            markers = self._markers[self.state]
            found = markers.pattern.search(self._pending, self._searched)
            if found is not None:
                parts += self._read_marker(found, markers.kinds[found[0]])
                continue
            border = len(self._pending)
            border -= 0 if last else possible_start(self._pending, markers.kinds)
            if self.state in (NORMAL, REASONING):
                return parts + self._read_text(self._take(border))
            self._searched = max(self._searched, border)
            if self.state == TOOL or len(self._pending) <= _MAX_HEADER:
                return parts
            parts += self._read_words(self._take(border))
            self.state = NORMAL

    def _read_marker(self, found: re.Match[str], kind: str) -> list[Part]:
        end, marker, before = found.end(), found[0], self._pending[: found.start()]
        if self.state == TOOL:
            return self._end_call(found, kind)
        if (kind == _STRAY and (before.strip() or not self._after_marker)) or (
            marker == "{" and (before.strip() or self._begun)
        ):
            return self._read_text(self._take(end))
        self._take(end)
        if kind == _MESSAGE:
            return self._read_header(before)
        parts = self._read_words(before) if self.state == HEADER else self._read_text(before)
        if kind in (TOOL, _BARE):
            self._begin_call(marker, kind)
            return parts
        self._pass_marker()
        self.state = NORMAL if kind == _STRAY else kind
        return parts

    def _pass_marker(self) -> None:
        self._newlines, self._after_marker = "", True
        self._answered = self._given = 0

    def _read_header(self, header: str) -> list[Part]:
        """What the header of a message says; words before it are text."""
        form, header = self._form.header, header.replace(MARK, "")
        assert form is not None
        parts = self._read_words(re.split(r"<\||to=", header)[0])
        called = form.calls.search(header) if form.calls and self._schemas else None
        self._pass_marker()
        self.state = REASONING if form.thinks.search(header) else NORMAL
        if called is not None and (called["space"] or called["name"] in self._schemas):
            self._begin_call(header + form.message, TOOL, called["name"])
        return parts

    def _read_words(self, header: str) -> list[Part]:
        """The words of a header that has no message."""
        self.state = NORMAL
        parts = self._read_text(_HEADER_WORDS.sub("", header.replace(MARK, "")).strip())
        self.state = HEADER
        return parts

    def _read_text(self, text: str) -> list[Part]:
        """Text or reasoning, without the newlines beside markers."""
        text = text.replace(MARK, "")
        given = min(self._given, len(text))
        self._given -= given
        text = text[given:]
        if self._after_marker:
            text = text.lstrip(_NEWLINE)
        if not text:
            return []
        self._after_marker = False
        self._begun |= self.state != REASONING
        text, self._newlines = self._newlines + text, ""
        if self.state != REASONING:
            self._answered += len(text)
            return [Text(text)]
        stripped = text.rstrip(_NEWLINE)
        self._newlines = text[len(stripped) :]
        return [Reasoning(stripped)] if stripped else []

    def _begin_call(self, marker: str, kind: str, name: str = "") -> None:
        self._outer = NORMAL if self.state == HEADER else self.state
        self._is_bare, self._start, self._name, self.state = kind == _BARE, marker, name, TOOL
        family, header = self._form.family, self._form.header
        ends = {family.bare_end if self._is_bare else family.end: NORMAL}
        if name and header is not None:
            ends = dict.fromkeys(header.ends, HEADER)
        elif self._outer == REASONING:
            ends[self._form.thought[1]] = REASONING
        self._markers[TOOL] = _Markers(self._marked(ends))
        if self._is_bare:
            self._pending, self._searched = marker + self._pending, len(marker)

    def _end_call(self, found: re.Match[str], kind: str) -> list[Part]:
        """The calls up to a marker; none if the marker is a part of the call."""
        between = self._between.search(self._pending, 0, found.start())
        if between is not None and not self._is_bare:
            for tail in (self._tail, ""):  # it may be missing before the next call
                with suppress(NotACallError):
                    parts = self._parse(self._pending[: between.start()] + tail)
                    self._take(between.end(1))
                    return parts
        try:
            parts = self._parse(self._body(found), lenient=bool(self._name))
        except NotACallError:
            if self._name or kind == REASONING:  # the marker is a token, or ends the thought
                return self._give_up()
            self._searched = found.end()
            return []
        self._take(found.end())
        self.state = NORMAL if kind == REASONING else kind
        return parts

    def _end_answer(self, truncated: bool) -> list[Part]:
        """The calls up to the first marker that ends one, or the end of the answer."""
        ends, start = self._markers[TOOL], len(self._start) if self._is_bare else 0
        found: list[re.Match[str] | None] = [*ends.pattern.finditer(self._pending, start)]
        if not found and truncated and ends.kinds:
            text = self._take(len(self._pending))
            self.state, self._after_marker = self._outer, False
            # After a call it is of no use to the client.
            text = text if self._is_bare else self._start + text
            return [] if self.calls or self._forced else self._read_text(text)
        found += self._begins.finditer(self._pending, start)  # an end may be missing
        found.sort(key=lambda one: one.start() if one else 0)
        for end in [*found, None]:
            body, border = self._body(end), end.end() if end else len(self._pending)
            begins_another = end is not None and end.re is not ends.pattern
            if end is not None and begins_another:
                body, border = self._pending[: end.start()], end.start()
            with suppress(NotACallError):
                parts = self._parse(body, lenient=not begins_another)
                self._take(border)
                self.state = NORMAL
                return parts
        return self._give_up()

    def _give_up(self) -> list[Part]:
        """What began a call is text, and the rest is read again."""
        self.state, self._after_marker, self._searched = self._outer, False, 0
        return self._read_text(self._take(len(self._start)) if self._is_bare else self._start)

    def _body(self, end: re.Match[str] | None) -> str:
        """The text of the call up to its end, which is a part of it if its start is."""
        if end is None:
            return self._pending
        family = self._form.family
        inside = self._is_bare and family.bare_end != family.end
        return self._pending[: end.end() if inside else end.start()]

    def _parse(self, body: str, lenient: bool = False) -> list[Part]:
        """The calls in a text, and the text behind them. Raises `NotACallError`."""
        body, rest = body.replace(MARK, ""), ""
        if self._name:
            found: list[Call] = [(self._name, read_arguments(body, lenient))]
        else:
            found, rest = read_calls(self._form.family.calls, body, self._schemas, lenient)
        found = [(self._own_name(name), arguments) for name, arguments in found]
        if self._is_bare and not {name for name, _ in found} <= set(self._schemas):
            raise NotACallError("unknown tool")
        calls = [
            ToolCall(
                f"call_{secrets.token_hex(12)}",
                name,
                typed_arguments(arguments, self._schemas.get(name)),
            )
            for name, arguments in found
        ]
        if not self._parallel:
            calls = calls[: 1 - self.calls]
        self.calls += len(calls)
        self.state = NORMAL
        self._pass_marker()
        return [*calls, *self._read_text(rest if rest.strip() else "")]

    def _own_name(self, name: str) -> str:
        """A tool's name without the space that some models write before it."""
        short = name.removeprefix("functions.")
        return short if name not in self._schemas and short in self._schemas else name

    def _take(self, border: int) -> str:
        """The pending text up to a place, which is pending no more."""
        text, self._pending = self._pending[:border], self._pending[border:]
        self._searched = 0
        return text


def joined(parts: Sequence[Part], kind: type[Text | Reasoning]) -> str:
    """The text of all parts of a kind."""
    return "".join(part.text for part in parts if isinstance(part, kind))


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
