"""From tokens to text: which characters are certain, and where the text ends.

A step can bring many tokens at once. They are taken one by one, so that EOS, a stop string and
`max_tokens` end the text at exactly the token where plain decoding would have ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from .errors import ConfigError
from .events import FinishReason
from .validation import TOKENIZER_ERRORS, ErrorWrapper


class Piece(NamedTuple):
    """What one step added: certain text, the tokens used, and why the text ended, if it did."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None


class TextStream:
    """Incremental text of one request.

    Characters are held back while their bytes are incomplete, or while they may be the start of a
    stop string. The stop string, the EOS token's text and everything after are never emitted.

    Args:
        detokenizer: a fresh `Detokenizer`, or what has its methods.
        eos_ids: the token ids that end the text.
        stop: strings that end the text, wherever token borders fall.
        max_tokens: the most tokens to take, an EOS token included.
        stop_applies: (token, text) -> whether stop strings count in the text that a token has
            added, or in how many of its last characters. It is called once per token; None is
            everywhere.

    Attributes:
        remaining: tokens that may still come.
        finish_reason: why the text ended; None while it goes on.
    """

    def __init__(
        self,
        detokenizer: Any,
        eos_ids: Collection[int],
        stop: Sequence[str],
        max_tokens: int,
        stop_applies: Callable[[int, str], int] | None = None,
    ) -> None:
        self._detokenizer, self._eos_ids = detokenizer, frozenset(eos_ids)
        self._stop, self._stop_applies = tuple(stop), stop_applies
        self.remaining = max_tokens
        self.finish_reason: FinishReason | None = None if max_tokens > 0 else "length"
        self._held = ""
        message = "The target's tokenizer cannot make text of its tokens"
        self._tokenizer_errors = ErrorWrapper(ConfigError, message, TOKENIZER_ERRORS)

    def add(self, tokens: Sequence[int]) -> Piece:
        """Take a step's tokens, up to the end of the text.

        Raises `ConfigError` for a token that the tokenizer does not know.
        """
        used: list[int] = []
        text = ""
        open_ended = self.finish_reason is None
        for token, segment in self._segments(tokens[: self.remaining] if open_ended else ()):
            used.append(token)
            text += self._add_token(token, segment)
            if self.finish_reason is not None:
                break
        return Piece(text, used, self.finish_reason)

    def _segments(self, tokens: Sequence[int]) -> list[tuple[int, str | None]]:
        """Each token with the text that it completes, up to an EOS token, which has None."""
        found: list[tuple[int, str | None]] = []
        with self._tokenizer_errors:
            for token in tokens:
                if token in self._eos_ids:
                    return [*found, (token, None)]
                self._detokenizer.add_token(token)
                found.append((token, self._detokenizer.last_segment))
        return found

    def _add_token(self, token: int, text: str | None) -> str:
        """The text that is certain after one more token."""
        self.remaining -= 1
        if text is None:
            self.finish_reason = "stop"
            return self._finalize()
        if not self._stop and self.remaining:
            return text
        self._held += text
        before = ""
        if self._stop and self._stop_applies is not None:
            applies = self._stop_applies(token, text)
            if applies is not True and applies < len(text):
                before = self._release(applies)
        if self._cut_at_stop():
            return before + self._release(0)
        if self.remaining == 0:
            self.finish_reason = "length"
            return before + self._finalize()
        return before + self._release(possible_start(self._held, self._stop))

    def _finalize(self) -> str:
        """The rest of the text, up to a stop string that it completes."""
        with self._tokenizer_errors:
            self._detokenizer.finalize()
            # A text that ends inside a character ends before it.
            self._held += self._detokenizer.last_segment.rstrip("\ufffd")
        if self._stop:
            self._cut_at_stop()
        return self._held

    def _release(self, keep: int) -> str:
        """The held text without its last `keep` characters."""
        border = len(self._held) - keep
        text, self._held = self._held[:border], self._held[border:]
        return text

    def _cut_at_stop(self) -> bool:
        """End the text before the first complete stop string; whether there is one."""
        starts = [start for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if not starts:
            return False
        self._held = self._held[: min(starts)]
        self.finish_reason = "stop"
        return True


def possible_start(text: str, strings: Collection[str]) -> int:
    """How many of a text's last characters may be the start of one of the strings."""
    longest = max((len(one) - 1 for one in strings), default=0)
    firsts = {one[0] for one in strings}  # there may be hundreds
    for length in range(min(longest, len(text)), 0, -1):
        if text[-length] in firsts and any(one.startswith(text[-length:]) for one in strings):
            return length
    return 0


class Detokenizer:
    """mlx-lm's streaming detokenizer, by which an id that the tokenizer has not is no text.

    A model's embedding may have more rows than its vocabulary. mlx-lm writes "!" for such an id.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = tokenizer.detokenizer
        # One without a map decodes with the tokenizer, which has no text for such an id.
        self._size = len(getattr(self._detokenizer, "tokenmap", ())) or None

    def add_token(self, token: int) -> None:
        """Take the next token."""
        if self._size is None or token < self._size:
            self._detokenizer.add_token(token)

    @property
    def last_segment(self) -> str:
        """The text that is certain and was not read yet."""
        text: str = self._detokenizer.last_segment
        return text

    def finalize(self) -> None:
        """Take the end of the text."""
        self._detokenizer.finalize()


def skip_text_start(detokenizer: Any, tokenizer: Any) -> None:
    """Prepare a fresh streaming detokenizer for tokens that continue a text.

    mlx-lm's detokenizers drop a space at the start of a text, so this one gets a token first.
    """
    ids = tokenizer.encode("a", add_special_tokens=False)[-1:] or range(len(tokenizer))
    detokenizer.add_token(next(token for token in ids if tokenizer.decode([token]).strip()))
    detokenizer.last_segment  # noqa: B018 (reading it drops that token's text)


def text_of(tokenizer: Any, tokens: Sequence[int], continues: bool = False) -> str:
    """The text that a `TextStream` without stop strings makes of these tokens.

    Args:
        tokenizer: the target's.
        tokens: token ids.
        continues: whether the tokens continue a text.
    """
    detokenizer = Detokenizer(tokenizer)
    if continues:
        skip_text_start(detokenizer, tokenizer)
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.last_segment
