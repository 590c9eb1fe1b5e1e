"""The thoughts of an answer, told from its text and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_mlx.answers.families import AnswerFormat
from dflash_mlx.answers.parser import REASONING, AnswerParser, Reasoning, Text

if TYPE_CHECKING:
    from dflash_mlx import Event, Target


class Thoughts:
    """Splits an answer into text and thoughts while it streams, and counts the thoughts.

    A step that ends the thoughts and begins the answer is counted with the thoughts.

    Args:
        target: what answers.
        ids: the prompt's token ids.

    Attributes:
        tokens: of the thoughts so far.
        rounds: steps that brought them, without the prefill.
    """

    def __init__(self, target: Target, ids: Sequence[int]) -> None:
        tokenizer = target.tokenizer
        form = AnswerFormat.of(tokenizer)
        begun = form.starts_in_thought(tokenizer, ids)
        self._parser = AnswerParser(form, {}, begun, detokenizer=tokenizer.detokenizer)
        self.tokens = self.rounds = self._rounds = 0

    def split(self, event: Event) -> list[tuple[str, bool]]:
        """The event's text in pieces, each with whether it is a thought, without markers."""
        before = self._parser.state
        pieces = [
            (part.text, isinstance(part, Reasoning))
            for part in self._parser.read(event)
            if isinstance(part, Text | Reasoning)
        ]
        if REASONING in (before, self._parser.state) or any(thought for _, thought in pieces):
            self.tokens += len(event.tokens)
            self.rounds += event.stats.rounds - self._rounds
        self._rounds = event.stats.rounds
        return pieces

    @property
    def tokens_per_round(self) -> float:
        """Tokens of thoughts per step; 0.0 without any."""
        return self.tokens / self.rounds if self.rounds else 0.0
