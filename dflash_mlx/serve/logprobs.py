"""Log-probabilities of an answer's tokens, read from the target's logits.

A logits processor that changes nothing sees the logits of each path, the drafter's first and the
target's after them. So the last logits noted for a path are the target's, after bias and penalties
and before top-p, min-p, top-k and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode


@dataclass(frozen=True)
class TokenProbability:
    """A token's id, log-probability, text and bytes."""

    token: int
    logprob: float
    text: str
    bytes: list[int]


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer, and the likeliest tokens in its place, best first."""

    chosen: TokenProbability
    top: list[TokenProbability]


class Vocabulary:
    """The bytes of single tokens, which may be half a character.

    Args:
        tokenizer: mlx-lm's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; none for an id that the tokenizer does not know."""
        text = str(self._tokenizer.decode([token]))
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if piece.startswith("\u2581"):  # a space of SentencePiece, which is not decoded alone
            return piece.replace("\u2581", " ").encode()
        if "\ufffd" not in text or text == piece:
            return text.encode()
        if len(piece) == 6 and piece.startswith("<0x"):  # a byte of SentencePiece
            return bytes([int(piece[3:5], 16)])
        return bytes(self._bytes.get(character, 0xFF) for character in piece)

    def probability(self, token: int, logprob: float) -> TokenProbability:
        """A token with its log-probability."""
        content = self.bytes_of(token)
        return TokenProbability(token, logprob, content.decode(errors="replace"), list(content))


class LogprobRecorder:
    """A logits processor that notes log-probabilities of one request, and changes nothing.

    The engine's thread calls it; another thread may take what belongs to a finished step.

    Args:
        vocabulary: the target's.
        top: how many of the likeliest tokens to report.
    """

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary, self._top = vocabulary, top
        self._prompt_length: int | None = None
        self._rows: dict[tuple[int, ...], np.ndarray] = {}  # by the answer before them
        self._answer: tuple[int, ...] = ()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Note the logits [1, V] after the history [H] (ids), and return them unchanged."""
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        scores = logits[0].astype(mx.float32)
        row = np.array(scores - mx.logsumexp(scores))  # waits for the device
        answer: Any = tokens[self._prompt_length :].tolist()
        self._rows[tuple(answer)] = row
        return logits

    def take(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """The log-probabilities of the answer's next tokens, those of a finished step."""
        found = []
        for token in tokens:
            row = self._rows[self._answer]
            best = np.argpartition(-row, self._top)[: self._top].tolist()
            best.sort(key=lambda one: (-row[one], one))
            chosen, *top = (self._probability(row, one) for one in (token, *best))
            found.append(TokenLogprob(chosen, top))
            self._answer = (*self._answer, token)
        for answer in [one for one in list(self._rows) if len(one) < len(self._answer)]:
            del self._rows[answer]
        return found

    def _probability(self, row: np.ndarray, token: int) -> TokenProbability:
        return self._vocabulary.probability(token, max(float(row[token]), -9999.0))
