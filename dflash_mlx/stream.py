"""From tokens to text: when a character is certain, and where the text ends.

A round can bring many tokens at once; they are taken one by one, so that EOS, a stop string and
`max_tokens` end the text at exactly the token where plain decoding would have ended it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from .errors import ConfigError
from .events import FinishReason
from .validation import ErrorWrapper


class Piece(NamedTuple):
    """What one round added: certain text, the tokens used, and why the text ended, if it did."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None


class TextStream:
    """Incremental text of one request.

    Characters are held back while their bytes are incomplete or while they may be the start of a
    stop string; the stop string itself, the EOS token's text and everything after are never shown.

    Args:
        detokenizer: a fresh streaming detokenizer of mlx-lm.
        eos_ids: the token ids that end the text.
        stop: strings that end the text, wherever token borders fall.
        max_tokens: the most tokens to take, an EOS token included.
    """

    def __init__(
        self, detokenizer: Any, eos_ids: Collection[int], stop: Sequence[str], max_tokens: int
    ) -> None:
        self._detokenizer, self._eos_ids = detokenizer, frozenset(eos_ids)
        self._stop = tuple(stop)
        self.remaining = max_tokens
        self.finish_reason: FinishReason | None = None if max_tokens > 0 else "length"
        self._held = ""
        self._detokenizing = ErrorWrapper(
            ConfigError, "The target's tokenizer cannot make text of its tokens"
        )

    def add(self, tokens: Sequence[int]) -> Piece:
        """Take a round's tokens up to where the text ends.

        Raises `ConfigError` for a token that the tokenizer does not know.
        """
        used: list[int] = []
        text = ""
        with self._detokenizing:
            for token in tokens:
                if self.finish_reason is not None:
                    break
                used.append(token)
                text += self._take(token)
        return Piece(text, used, self.finish_reason)

    def _take(self, token: int) -> str:
        self.remaining -= 1
        if token in self._eos_ids:
            self.finish_reason = "stop"
            return self._flush()
        self._detokenizer.add_token(token)
        self._held += self._detokenizer.last_segment
        if self._stop and self._cut_at_stop():
            return self._release(0)
        if self.remaining == 0:
            self.finish_reason = "length"
            return self._flush()
        return self._release(self._possible_stop() if self._stop else 0)

    def _flush(self) -> str:
        """All that is left at the end, unless it completes a stop string."""
        self._detokenizer.finalize()
        # Ended in the middle of a character: its first bytes alone are not text.
        self._held += self._detokenizer.last_segment.rstrip("\ufffd")
        self._cut_at_stop()
        return self._release(0)

    def _release(self, keep: int) -> str:
        """The held text but for its last `keep` characters."""
        border = len(self._held) - keep
        text, self._held = self._held[:border], self._held[border:]
        return text

    def _cut_at_stop(self) -> bool:
        """End the text before the first stop string, if one is complete."""
        places = [self._held.find(stop) for stop in self._stop]
        if not any(place >= 0 for place in places):
            return False
        self._held = self._held[: min(place for place in places if place >= 0)]
        self.finish_reason = "stop"
        return True

    def _possible_stop(self) -> int:
        """How many of the last held characters may be the start of a stop string."""
        longest = max(len(stop) - 1 for stop in self._stop)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


def skip_text_start(detokenizer: Any, tokenizer: Any) -> None:
    """Have a fresh streaming detokenizer of mlx-lm's take its tokens for the rest of a text.

    It leaves out a space that a text begins with; so it is shown some token before.
    """
    some = tokenizer.encode("a", add_special_tokens=False)[-1:]
    ids = some or range(len(tokenizer))  # bytes may have no letter of their own
    detokenizer.add_token(next(token for token in ids if tokenizer.decode([token]).strip()))
    detokenizer.last_segment  # noqa: B018 (what it says of that token is read, and dropped)


def text_of(tokenizer: Any, tokens: Sequence[int], continues: bool = False) -> str:
    """What a `TextStream` makes of all tokens of a text, without stop strings."""
    detokenizer = tokenizer.detokenizer
    if continues:
        skip_text_start(detokenizer, tokenizer)
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.last_segment)
