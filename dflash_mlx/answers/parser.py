"""Splits an answer into text, reasoning and calls while it streams.

If the vocabulary has a marker as a single token, only that token counts: the same characters in
ordinary tokens are text. The text of a call is held back until the call ends. Then it becomes a
call, or stays text if it does not parse as one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ..events import Event
from ..stream import partial_match_length
from .calls import read_calls
from .families import AnswerFormat
from .literals import NotACallError
from .markers import BARE, HEADER, MESSAGE, NORMAL, REASONING, STRAY, TOOL, AnswerMarkers, Markers
from .marks import MARK, MarkedText
from .parts import Part, Reasoning, Text, ToolCall, merge_texts
from .values import Call, Schemas, read_arguments, typed_arguments

_NEWLINE: Final = "\n"
_MAX_HEADER: Final = 200  # characters; a longer header is text
_HEADER_WORDS: Final = re.compile(
    r"<\|start\|>|assistant|<\|channel\|>|(?<=<\|channel\|>)\s*(?:analysis|commentary|final)\b"
    r"|<\|constrain\|>\s*\w*|to=\S+"
)


class AnswerParser:
    """Splits one answer into parts.

    Args:
        form: how the model answers.
        schemas: the schemas of the tools that may be called, by name. Without tools, nothing is a
            call.
        starts_in_reasoning: whether the prompt ends where reasoning starts.
        parallel: whether more than one call is allowed.
        detokenizer: a fresh detokenizer, of the kind that the engine uses for the text. Without
            one, spelled markers count as well.
        forced: whether the answer must be a call. If so, an incomplete call is dropped.

    Attributes:
        calls: the number of calls so far.
        state: what the current text is: `NORMAL`, `REASONING`, `TOOL` or `HEADER`.
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
        self._form = form
        self._schemas = schemas
        self._parallel = parallel
        self._forced = forced
        self._text = detokenizer and MarkedText(detokenizer, form.tokens)
        self.calls = 0
        state = REASONING if starts_in_reasoning else NORMAL
        self.state = state if form.header is None else HEADER
        self._markers = AnswerMarkers(form, schemas)
        self._pending = ""  # text that may be a marker, a header or a call
        self._searched = 0  # no marker in the pending text begins before this position
        # The current call.
        self._call_ends = Markers({})  # the markers that may end it
        self._start = ""  # the marker or header that began it
        self._name = ""  # its name, if a header has it
        self._is_bare = False  # whether its start marker is missing
        self._outer = NORMAL  # the state before it
        self._newlines = ""  # held back, because they are dropped if a marker follows
        self._after_marker = starts_in_reasoning  # whether the next newlines are dropped
        self._has_text = False  # whether the answer has text already
        self._answer_characters = 0  # characters of the answer since the last marker
        self._prompt_characters = 0  # characters of the pending text that the prompt contains

    def begin(self, text: str) -> None:
        """Read the beginning of the answer from the prompt, so that only what follows is new.

        A call that begins in the prompt is read as a whole.
        """
        self._pending = self._markers.with_marks(text)  # a tokenizer makes single tokens of markers
        self._read()
        self.calls = 0
        self._newlines = ""
        if self.state != HEADER:
            start = self._start if self.state == TOOL and not self._is_bare else ""
            self._prompt_characters = len((start + self._pending).replace(MARK, ""))

    def read(self, event: Event) -> list[Part]:
        """Return the parts that an event adds."""
        parts = self.feed(event.text, event.tokens)
        if event.finish_reason is not None:
            parts += self.finish(truncated=event.finish_reason == "length")
        return parts

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """Return the parts that the next text of the answer adds."""
        self._pending += self._text.add(text, tokens) if self._text else text
        return merge_texts(self._read())

    def answer_length(self, token: int, text: str) -> int:
        """Read the next token, and return how many of its last characters belong to the answer.

        The others belong to thoughts, calls, markers, and the newlines next to them.
        """
        self.feed(text, [token])
        if self.state != NORMAL:
            return 0
        return min(len(text), self._answer_characters + len(self._pending.replace(MARK, "")))

    def finish(self, truncated: bool) -> list[Part]:
        """Return the remaining parts. `truncated` says that `max_tokens` ended the answer."""
        parts = self._read(is_last=True)
        while self.state == TOOL:
            parts += self._end_answer(truncated)
            parts += self._read(is_last=True)
        if self.state == HEADER:
            parts += self._read_words(self._take(len(self._pending)))
        return merge_texts(parts)

    def _read(self, is_last: bool = False) -> list[Part]:
        """Read the pending text, except for what may be the start of a marker."""
        parts: list[Part] = []
        while True:
            markers = self._call_ends
            if self.state != TOOL:
                markers = self._markers.in_state[self.state]
            match = markers.pattern.search(self._pending, self._searched)
            if match is not None:
                parts += self._read_marker(match, markers.kinds[match[0]])
                continue
            border = len(self._pending)
            if not is_last:
                border -= partial_match_length(self._pending, markers.kinds)
            if self.state in (NORMAL, REASONING):
                return parts + self._read_text(self._take(border))
            self._searched = max(self._searched, border)
            if self.state == TOOL or len(self._pending) <= _MAX_HEADER:
                return parts
            parts += self._read_words(self._take(border))
            self.state = NORMAL

    def _is_plain_text(self, marker: str, kind: str, before: str) -> bool:
        """Whether a marker is part of the answer's text, because of what comes before it."""
        if kind == STRAY:  # the end of a call counts right after another marker only
            return bool(before.strip()) or not self._after_marker
        if marker == "{":  # it begins a call at the start of an answer only
            return bool(before.strip()) or self._has_text
        return False

    def _read_marker(self, match: re.Match[str], kind: str) -> list[Part]:
        """Read the pending text up to the end of a marker."""
        if self.state == TOOL:
            return self._end_call(match, kind)
        marker = match[0]
        before = self._pending[: match.start()]
        if self._is_plain_text(marker, kind=kind, before=before):
            return self._read_text(self._take(match.end()))
        self._take(match.end())
        if kind == MESSAGE:
            return self._read_header(before)
        parts = self._read_words(before) if self.state == HEADER else self._read_text(before)
        if kind in (TOOL, BARE):
            self._begin_call(marker, kind)
            return parts
        self._pass_marker()
        self.state = NORMAL if kind == STRAY else kind
        return parts

    def _pass_marker(self) -> None:
        self._newlines = ""
        self._after_marker = True
        self._answer_characters = 0
        self._prompt_characters = 0

    def _read_header(self, text: str) -> list[Part]:
        """Read the header of a message. Words before it are text."""
        header = self._form.header
        assert header is not None
        text = text.replace(MARK, "")
        parts = self._read_words(re.split(r"<\||to=", text)[0])
        self._pass_marker()
        self.state = REASONING if header.thinks.search(text) else NORMAL
        call = header.calls.search(text) if header.calls and self._schemas else None
        if call is not None and (call["space"] or call["name"] in self._schemas):
            self._begin_call(text + header.message, TOOL, call["name"])
        return parts

    def _read_words(self, header: str) -> list[Part]:
        """Return the words of a header that has no message."""
        self.state = NORMAL
        parts = self._read_text(_HEADER_WORDS.sub("", header.replace(MARK, "")).strip())
        self.state = HEADER
        return parts

    def _read_text(self, text: str) -> list[Part]:
        """Return text or reasoning, without the newlines next to markers."""
        text = text.replace(MARK, "")
        skipped = min(self._prompt_characters, len(text))
        self._prompt_characters -= skipped
        text = text[skipped:]
        if self._after_marker:
            text = text.lstrip(_NEWLINE)
        if not text:
            return []
        self._after_marker = False
        text = self._newlines + text
        self._newlines = ""
        if self.state != REASONING:
            self._has_text = True
            self._answer_characters += len(text)
            return [Text(text)]
        stripped = text.rstrip(_NEWLINE)
        self._newlines = text[len(stripped) :]
        return [Reasoning(stripped)] if stripped else []

    def _begin_call(self, marker: str, kind: str, name: str = "") -> None:
        """Begin to read a call after its marker, or after a header with its name."""
        self._outer = NORMAL if self.state == HEADER else self.state
        self._is_bare = kind == BARE
        self._start = marker
        self._name = name
        self.state = TOOL
        family = self._form.family
        header = self._form.header
        ends = {family.bare_end if self._is_bare else family.end: NORMAL}
        if name and header is not None:
            ends = dict.fromkeys(header.ends, HEADER)
        elif self._outer == REASONING:
            _, closes = self._form.thought
            ends[closes] = REASONING
        self._call_ends = Markers(self._markers.with_all_marks(ends))
        if self._is_bare:
            self._pending = marker + self._pending
            self._searched = len(marker)

    def _end_call(self, end: re.Match[str], kind: str) -> list[Part]:
        """Return the calls up to a marker; none if the marker is part of a call."""
        between = self._markers.between_calls.search(self._pending, 0, end.start())
        if between is not None and not self._is_bare:
            # The tail may be missing before the next call.
            for tail in (self._markers.call_tail, ""):
                with suppress(NotACallError):
                    parts = self._parse(self._pending[: between.start()] + tail)
                    self._take(between.end(1))
                    return parts
        try:
            parts = self._parse(self._call_text(end), lenient=bool(self._name))
        except NotACallError:
            if self._name or kind == REASONING:  # the marker is a token, or ends the thought
                return self._give_up()
            self._searched = end.end()
            return []
        self._take(end.end())
        self.state = NORMAL if kind == REASONING else kind
        return parts

    def _end_answer(self, truncated: bool) -> list[Part]:
        """Return the calls up to the first marker that ends one, or to the end of the answer."""
        ends = self._call_ends
        start = len(self._start) if self._is_bare else 0
        matches = list(ends.pattern.finditer(self._pending, start))
        if not matches and truncated and ends.kinds:
            return self._drop_call()
        # An end may be missing before the next call.
        matches += self._markers.call_start.finditer(self._pending, start)
        matches.sort(key=lambda match: match.start())
        for match in matches:
            if match.re is ends.pattern:
                text = self._call_text(match)
                border = match.end()
            else:
                text = self._pending[: match.start()]
                border = match.start()
            with suppress(NotACallError):
                return self._end_calls(text, border, lenient=match.re is ends.pattern)
        with suppress(NotACallError):
            return self._end_calls(self._pending, len(self._pending), lenient=True)
        return self._give_up()

    def _end_calls(self, text: str, border: int, lenient: bool) -> list[Part]:
        """Parse the calls in a text, and remove the pending text up to a border."""
        parts = self._parse(text, lenient)
        self._take(border)
        self.state = NORMAL
        return parts

    def _drop_call(self) -> list[Part]:
        """End an answer that `max_tokens` cut inside a call.

        The client gets its text unless the answer has other calls, or had to be a call.
        """
        text = self._take(len(self._pending))
        if not self._is_bare:
            text = self._start + text
        self.state = self._outer
        self._after_marker = False
        return [] if self.calls or self._forced else self._read_text(text)

    def _give_up(self) -> list[Part]:
        """Return the beginning of the call as text. The rest is read again."""
        self.state = self._outer
        self._after_marker = False
        self._searched = 0
        if self._is_bare:  # the pending text contains the beginning
            return self._read_text(self._take(len(self._start)))
        return self._read_text(self._start)

    def _call_text(self, end: re.Match[str]) -> str:
        """Return the pending text up to the end of a call.

        The text includes the end if it includes the beginning as well.
        """
        family = self._form.family
        includes_end = self._is_bare and family.bare_end != family.end
        return self._pending[: end.end() if includes_end else end.start()]

    def _parse(self, text: str, lenient: bool = False) -> list[Part]:
        """Return the calls in a text, and the text after them. Raises `NotACallError`."""
        text = text.replace(MARK, "")
        rest = ""
        if self._name:
            read: list[Call] = [(self._name, read_arguments(text, lenient))]
        else:
            read, rest = read_calls(
                self._form.family.calls,
                text,
                schemas=self._schemas,
                lenient=lenient,
            )
        calls = []
        for written_name, arguments in read:
            name = self._tool_name(written_name)
            if self._is_bare and name not in self._schemas:
                raise NotACallError("unknown tool")
            arguments_text = typed_arguments(arguments, self._schemas.get(name))
            calls.append(ToolCall(f"call_{secrets.token_hex(12)}", name, arguments_text))
        if not self._parallel:  # an answer may have only one call
            calls = calls[:1] if self.calls == 0 else []
        self.calls += len(calls)
        self.state = NORMAL
        self._pass_marker()
        return [*calls, *self._read_text(rest if rest.strip() else "")]

    def _tool_name(self, written_name: str) -> str:
        """Return a tool's name without the namespace that some models write before it."""
        if written_name in self._schemas:
            return written_name
        name = written_name.removeprefix("functions.")
        return name if name in self._schemas else written_name

    def _take(self, border: int) -> str:
        """Remove the pending text up to a border, and return it."""
        text = self._pending[:border]
        self._pending = self._pending[border:]
        self._searched = 0
        return text
