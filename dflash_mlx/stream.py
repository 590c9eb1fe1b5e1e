"""Turns tokens into text: which characters are certain, and where the text ends.

A step can bring many tokens at once. They are added one by one, so that EOS, a stop string and
`max_tokens` end the text at exactly the token where plain decoding would have ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from .errors import ConfigError
from .events import FinishReason
from .validation import TOKENIZER_ERRORS, ErrorWrapper


class Piece(NamedTuple):
    """The text that one step added, the tokens it used, and why the text ended, if it did."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None


class TextStream:
    """Incremental text of one request.

    Characters are held back while their bytes are incomplete, or while they may be the start of a
    stop string. The stop string, the EOS token's text and everything after them are never emitted.

    Args:
        detokenizer: a fresh `Detokenizer`, or an object with its methods.
        eos_ids: the token ids that end the text.
        stop: strings that end the text, wherever token borders fall.
        max_tokens: the most tokens to add, including an EOS token.
        stop_applies: called once for each token, with the token and the text that it adds. Returns
            how many of this text's last characters may be part of a stop string; True for all.
            None stands for a function that always returns True.

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
        self._detokenizer = detokenizer
        self._eos_ids = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._stop_applies = stop_applies
        self.remaining = max_tokens
        self.finish_reason: FinishReason | None = None if max_tokens > 0 else "length"
        self._held = ""
        message = "The target's tokenizer cannot make text of its tokens"
        self._tokenizer_errors = ErrorWrapper(ConfigError, message, TOKENIZER_ERRORS)

    def add(self, tokens: Sequence[int]) -> Piece:
        """Add a step's tokens, up to the end of the text.

        Raises `ConfigError` for a token that the tokenizer does not know.
        """
        used: list[int] = []
        text = ""
        if self.finish_reason is not None:
            return Piece(text, used, self.finish_reason)
        for token, segment in self._segments(tokens[: self.remaining]):
            used.append(token)
            text += self._add_token(token, segment)
            if self.finish_reason is not None:
                break
        return Piece(text, used, self.finish_reason)

    def _segments(self, tokens: Sequence[int]) -> list[tuple[int, str | None]]:
        """Pair each token with the text that it completes. An EOS token comes last, with None."""
        segments: list[tuple[int, str | None]] = []
        with self._tokenizer_errors:
            for token in tokens:
                if token in self._eos_ids:
                    segments.append((token, None))
                    break
                self._detokenizer.add_token(token)
                segments.append((token, self._detokenizer.last_segment))
        return segments

    def _add_token(self, token: int, text: str | None) -> str:
        """Add one token with its text, and return the text that is certain now."""
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
        return before + self._release(partial_match_length(self._held, self._stop))

    def _finalize(self) -> str:
        """Return the rest of the text, up to a stop string that it completes."""
        with self._tokenizer_errors:
            self._detokenizer.finalize()
            # Drop an incomplete character at the end.
            self._held += self._detokenizer.last_segment.rstrip("\ufffd")
        if self._stop:
            self._cut_at_stop()
        return self._held

    def _release(self, keep: int) -> str:
        """Release all but the last `keep` characters of the held text."""
        border = len(self._held) - keep
        text = self._held[:border]
        self._held = self._held[border:]
        return text

    def _cut_at_stop(self) -> bool:
        """End the text before the first complete stop string. Returns whether there is one."""
        starts = [self._held.find(stop) for stop in self._stop if stop in self._held]
        if not starts:
            return False
        self._held = self._held[: min(starts)]
        self.finish_reason = "stop"
        return True


def partial_match_length(text: str, strings: Collection[str]) -> int:
    """Return how many of a text's last characters may be the start of one of the strings."""
    longest = max((len(string) - 1 for string in strings), default=0)
    # There may be hundreds of strings: compare their first characters before anything else.
    first_characters = {string[0] for string in strings}
    for length in range(min(longest, len(text)), 0, -1):
        ending = text[-length:]
        if ending[0] in first_characters and any(string.startswith(ending) for string in strings):
            return length
    return 0


class Detokenizer:
    """mlx-lm's streaming detokenizer, except that unknown ids have no text.

    A model's embedding may have more rows than its vocabulary. mlx-lm writes "!" for such an id.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = tokenizer.detokenizer
        # A detokenizer without a map uses the tokenizer, which has no text for unknown ids anyway.
        self._vocab_size = len(getattr(self._detokenizer, "tokenmap", ())) or None

    def add_token(self, token: int) -> None:
        """Add the next token."""
        if self._vocab_size is None or token < self._vocab_size:
            self._detokenizer.add_token(token)

    @property
    def last_segment(self) -> str:
        """The text that is certain and has not been read yet."""
        text: str = self._detokenizer.last_segment
        return text

    def finalize(self) -> None:
        """End the text."""
        self._detokenizer.finalize()


def skip_text_start(detokenizer: Any, tokenizer: Any) -> None:
    """Prepare a fresh streaming detokenizer for tokens that continue a text.

    mlx-lm's detokenizers drop a space at the start of a text, so this adds a token first.
    """
    ids = tokenizer.encode("a", add_special_tokens=False)[-1:] or range(len(tokenizer))
    detokenizer.add_token(next(token for token in ids if tokenizer.decode([token]).strip()))
    detokenizer.last_segment  # noqa: B018 (reading it drops that token's text)


def decode_text(tokenizer: Any, tokens: Sequence[int], continues: bool = False) -> str:
    """Return the text that a `TextStream` without stop strings makes of these tokens.

    Args:
        tokenizer: the target's tokenizer.
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
