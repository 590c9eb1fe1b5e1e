"""Log-probabilities of an answer's tokens, read from the target's logits.

A logits processor that changes nothing sees the logits after each path: first the drafter's, then
the target's. So the last logits recorded for a path are the target's, after bias and penalties and
before top-p, min-p, top-k and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

LEAST_LOGPROB: Final = -9999.0  # as in OpenAI's API, because JSON has no -inf
_BYTES: Final = {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return a token's bytes, which may be part of a character. An unknown id has none.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        token: the token's id.
    """
    text = str(tokenizer.decode([token]))
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    if piece.startswith("\u2581"):  # SentencePiece's space, which decoding a single token drops
        return piece.replace("\u2581", " ").encode()
    if "\ufffd" not in text or text == piece:
        return text.encode()
    if len(piece) == 6 and piece.startswith("<0x"):  # a byte of SentencePiece
        return bytes([int(piece[3:5], 16)])
    return bytes(_BYTES.get(character, 0xFF) for character in piece)


class LogprobRecorder:
    """A logits processor that records the log-probabilities of one request, and changes nothing.

    The engine's thread calls it. Another thread may take the records of a finished step.

    Args:
        tokenizer: the target's tokenizer.
        top: how many of the most likely tokens to report.
    """

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._prompt_length: int | None = None
        self._rows: dict[tuple[int, ...], np.ndarray] = {}  # answer -> log-probabilities after it
        self._answer: tuple[int, ...] = ()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Record the logits [1, V] after the history [H] (ids), and return them unchanged."""
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        scores = logits[0].astype(mx.float32)
        row = np.array(scores - mx.logsumexp(scores))  # waits for the device
        answer: Any = tokens[self._prompt_length :].tolist()
        self._rows[tuple(answer)] = row
        return logits

    def take(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Describe the tokens of a finished step, in OpenAI's format.

        Each has a "token" (its text), "logprob" and "bytes", and "top_logprobs": the most likely
        tokens at its position, best first.
        """
        descriptions = []
        for token in tokens:
            row = self._rows[self._answer]
            best = np.argpartition(-row, self._top)[: self._top].tolist()
            best.sort(key=lambda candidate: (-row[candidate], candidate))
            top = [self._describe(row, candidate) for candidate in best]
            descriptions.append(self._describe(row, token) | {"top_logprobs": top})
            self._answer = (*self._answer, token)
        for answer in list(self._rows):
            if len(answer) < len(self._answer):
                del self._rows[answer]
        return descriptions

    def _describe(self, row: np.ndarray, token: int) -> dict[str, Any]:
        content = token_bytes(self._tokenizer, token)
        return {
            "token": content.decode(errors="replace"),
            "logprob": max(float(row[token]), LEAST_LOGPROB),
            "bytes": list(content),
        }
