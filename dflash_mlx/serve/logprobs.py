"""Log-probabilities of an answer's tokens, read from the target's logits.

A logits processor that changes nothing sees the logits of each path, the drafter's first and the
target's after them. So the last logits noted for a path are the target's, after bias and penalties
and before top-p, min-p, top-k and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES: Final = {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """A token's bytes, which may be half a character; none for an id that is unknown.

    Args:
        tokenizer: mlx-lm's.
        token: its id.
    """
    text = str(tokenizer.decode([token]))
    piece = tokenizer.convert_ids_to_tokens(token) or ""
    if piece.startswith("\u2581"):  # a space of SentencePiece, which is not decoded alone
        return piece.replace("\u2581", " ").encode()
    if "\ufffd" not in text or text == piece:
        return text.encode()
    if len(piece) == 6 and piece.startswith("<0x"):  # a byte of SentencePiece
        return bytes([int(piece[3:5], 16)])
    return bytes(_BYTES.get(character, 0xFF) for character in piece)


class LogprobRecorder:
    """A logits processor that notes log-probabilities of one request, and changes nothing.

    The engine's thread calls it; another thread may take what belongs to a finished step.

    Args:
        tokenizer: the target's.
        top: how many of the likeliest tokens to report.
    """

    def __init__(self, tokenizer: Any, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
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

    def take(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """The answer's next tokens, those of a finished step, as OpenAI describes them.

        Each has a "token" (its text), "logprob" and "bytes", and "top_logprobs": the likeliest
        tokens in its place, best first.
        """
        found = []
        for token in tokens:
            row = self._rows[self._answer]
            best = np.argpartition(-row, self._top)[: self._top].tolist()
            best.sort(key=lambda one: (-row[one], one))
            chosen, *top = (self._describe(row, one) for one in (token, *best))
            found.append(chosen | {"top_logprobs": top})
            self._answer = (*self._answer, token)
        for answer in [one for one in list(self._rows) if len(one) < len(self._answer)]:
            del self._rows[answer]
        return found

    def _describe(self, row: np.ndarray, token: int) -> dict[str, Any]:
        content, logprob = token_bytes(self._tokenizer, token), max(float(row[token]), -9999.0)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(content)}
