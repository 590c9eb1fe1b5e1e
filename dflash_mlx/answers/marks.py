"""Marks in the text of an answer, before the markers that are single tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

MARK: Final = "\udc00"  # stands before a marker that is a single token; no text contains it


class MarkedText:
    """The text of an answer, with `MARK` before each marker that is a single token.

    Args:
        detokenizer: a fresh detokenizer, of the kind that the engine uses for the text.
        tokens: token id -> text of the markers.
    """

    def __init__(self, detokenizer: Any, tokens: Mapping[int, str]) -> None:
        self._detokenizer = detokenizer
        self._tokens = tokens
        self._decoded_length = 0  # characters of all tokens so far
        self._text_length = 0  # characters of all texts so far, which lag behind the tokens
        self._positions: list[int] = []  # of the markers that no text contains yet

    def add(self, text: str, tokens: Sequence[int]) -> str:
        """Return the next text with marks. The text may lag behind the tokens."""
        if not self._tokens:
            return text
        for token in tokens:
            self._detokenizer.add_token(token)
            self._decoded_length += len(self._detokenizer.last_segment)
            if token in self._tokens:
                self._positions.append(self._decoded_length - len(self._tokens[token]))
        start = self._text_length
        self._text_length += len(text)
        inside = [position for position in self._positions if position < self._text_length]
        self._positions = self._positions[len(inside) :]
        for position in reversed(inside):
            index = position - start
            text = text[:index] + MARK + text[index:]
        return text
