"""How many tokens of an answer belong to its thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from ..stream import Detokenizer
from .parser import REASONING, AnswerParser


class ThoughtCounter:
    """Counts the tokens of thoughts, with those of the markers beside them, while they come.

    Args:
        parser: a parser of the same answer, for this alone.
        detokenizer: a fresh one.

    Attributes:
        tokens: of the thoughts so far.
    """

    def __init__(self, parser: AnswerParser, detokenizer: Detokenizer) -> None:
        self._parser = parser
        self._detokenizer = detokenizer
        self.tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next tokens."""
        for token in tokens:
            before = self._parser.state
            self._detokenizer.add_token(token)
            self._parser.feed(self._detokenizer.last_segment, [token])
            self.tokens += REASONING in (before, self._parser.state)
