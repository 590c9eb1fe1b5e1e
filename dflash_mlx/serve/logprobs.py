"""How likely the tokens of an answer were: read off the target's logits as they go by.

A logits processor that changes nothing sees each row of a round with the history of its own path,
the drafter's rows first and the target's after them. So what was noted last of a history is the
target's, after bias and penalties and before top-p, min-p, top-k and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

Row = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Likely:
    """A token, the logarithm of its probability, its text and its bytes."""

    token: int
    logprob: float
    text: str
    bytes: list[int]


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer, and the likeliest ones in its place, best first."""

    chosen: Likely
    top: list[Likely]


class Vocabulary:
    """What single tokens are, in bytes: half a character is no text.

    Args:
        tokenizer: mlx-lm's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; none of an id that the tokenizer does not know."""
        text = str(self._tokenizer.decode([token]))
        if "\ufffd" not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        if len(piece) == 6 and piece.startswith("<0x"):  # a byte of SentencePiece
            return bytes([int(piece[3:5], 16)])
        return bytes(self._bytes.get(character, 0xFF) for character in piece)

    def likely(self, token: int, logprob: float) -> Likely:
        """A token as an answer tells of it."""
        content = self.bytes_of(token)
        return Likely(token, logprob, content.decode(errors="replace"), list(content))


class Recorder:
    """A logits processor that notes log-probabilities and changes nothing. It serves one request.

    The engine's thread calls it; another one may take what it noted of a round that is over.

    Args:
        vocabulary: the target's.
        top: how many of the likeliest tokens to tell.
    """

    def __init__(self, vocabulary: Vocabulary, top: int) -> None:
        self._vocabulary, self._top = vocabulary, top
        self._prompt: int | None = None
        self._rows: dict[tuple[int, ...], Row] = {}  # by the answer before them
        self._answer: tuple[int, ...] = ()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The logits [1, V] as they were, noted for the history [H]."""
        if self._prompt is None:
            self._prompt = len(tokens)
        scores = logits[0].astype(mx.float32)
        row = np.array(scores - mx.logsumexp(scores))  # waits for the device
        answer: Any = tokens[self._prompt :].tolist()
        self._rows[tuple(answer)] = row
        return logits

    def take(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Those of the answer's next tokens, which a round has made certain."""
        told = []
        for token in tokens:
            row = self._rows[self._answer]
            best = np.argsort(-row, kind="stable")[: self._top]
            told.append(
                TokenLogprob(
                    self._likely(row, token), [self._likely(row, int(other)) for other in best]
                )
            )
            self._answer = (*self._answer, token)
        for answer in [one for one in list(self._rows) if len(one) < len(self._answer)]:
            del self._rows[answer]
        return told

    def _likely(self, row: Row, token: int) -> Likely:
        return self._vocabulary.likely(token, max(float(row[token]), -9999.0))
