"""Marks in the text of an answer, where markers are tokens of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

MARK: Final = "\udc00"  # before a marker that is a token of its own; no text has it


class MarkedText:
    """The text of an answer with `MARK` before each marker that is a token of its own.

    Args:
        detokenizer: a fresh one, as the engine uses one for the text.
        tokens: token id -> text of the markers.
    """

    def __init__(self, detokenizer: Any, tokens: Mapping[int, str]) -> None:
        self._detokenizer, self._tokens = detokenizer, tokens
        self._length = self._start = 0  # of the text so far: of all tokens, and of `add`
        self._marks: list[int] = []

    def add(self, text: str, tokens: Sequence[int]) -> str:
        """The next text, which may lag behind the tokens, with marks."""
        for token in tokens if self._tokens else ():
            self._detokenizer.add_token(token)
            self._length += len(self._detokenizer.last_segment)
            if token in self._tokens:
                self._marks.append(self._length - len(self._tokens[token]))
        start, self._start = self._start, self._start + len(text)
        marks = [at - start for at in self._marks if at < self._start]
        self._marks = self._marks[len(marks) :]
        for at in reversed(marks):
            text = text[:at] + MARK + text[at:]
        return text
