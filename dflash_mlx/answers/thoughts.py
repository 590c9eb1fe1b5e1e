"""Counts the tokens of an answer that belong to its thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from ..stream import Detokenizer
from .markers import REASONING
from .parser import AnswerParser


class ThoughtCounter:
    """Counts the tokens of thoughts and of their markers while an answer streams.

    Args:
        parser: a parser of the same answer, which only this counter uses.
        detokenizer: a fresh detokenizer.

    Attributes:
        tokens: the number of tokens of thoughts so far.
    """

    def __init__(self, parser: AnswerParser, detokenizer: Detokenizer) -> None:
        self._parser = parser
        self._detokenizer = detokenizer
        self.tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add the next tokens."""
        for token in tokens:
            state_before = self._parser.state
            self._detokenizer.add_token(token)
            self._parser.feed(self._detokenizer.last_segment, [token])
            if REASONING in (state_before, self._parser.state):
                self.tokens += 1
