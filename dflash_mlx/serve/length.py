"""How many tokens a text has at least, told without a tokenizer's work.

Of a text of many megabytes a tokenizer makes some hundred bytes a token, only to find that no
context holds them. But a token of n bytes can stand for no more than n bytes of the text. So let
each byte count 1/n, with n the length of the longest token that has this byte in it: the bytes of
any one token come to 1 at most, and those of a text to its number of tokens at most. Long tokens
are runs of spaces and dashes, which so make nothing of the words.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

# What a tokenizer may do to a text without a byte of it being lost.
_KEEPING: Final = {"Sequence", "ByteLevel", "Split", "Digits", "Metaspace", "Prepend", "NFC"}
_AT_ONCE: Final = 2**20  # bytes, each of which takes eight where they are counted


class LeastTokens:
    """Of texts in one vocabulary.

    It says something of byte-pair encodings of bytes (GPT-2's and its heirs) and of SentencePiece's
    with bytes to fall back on, 0 of all others, as of those that drop or shorten what they read.

    Args:
        tokenizer: mlx-lm's or transformers'.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._parts = _parts_of(backend) if backend is not None else None
        self._weights = np.zeros(256)
        if self._parts is not None:
            pieces = set(_pieces(backend, "ByteLevel" in self._parts))
            for piece in sorted(pieces, key=len, reverse=True):
                for byte in set(piece):
                    # One that is no token of its own may be dropped, or many of them be one.
                    if not self._weights[byte] and bytes([byte]) in pieces:
                        self._weights[byte] = 1 / len(piece)
            if self._parts & {"Replace", "Metaspace"}:
                self._weights[ord(" ")] = 0  # the vocabulary has another character for it

    def of(self, text: str) -> int:
        """The least number of tokens that this text may have."""
        if self._parts is None:
            return 0
        content = np.frombuffer(text.encode(errors="replace"), np.uint8)
        if "NFC" in self._parts and not unicodedata.is_normalized("NFC", text):
            # Between others of ASCII no character is ever composed with its neighbour.
            ascii = content < 128
            content = content[ascii & np.append(ascii[1:], True)]
        sums = (
            np.bincount(content[start : start + _AT_ONCE], minlength=256) @ self._weights
            for start in range(0, len(content), _AT_ONCE)
        )
        return math.floor(sum(sums) * (1 - 1e-9))  # which is rounded


def _parts_of(backend: Any) -> set[str] | None:
    """The kinds of steps that a tokenizer takes; None where one may lose a byte of the text."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.unk_token is not None and not model.byte_fallback:
        return None
    if any(one.lstrip or one.rstrip for one in backend.get_added_tokens_decoder().values()):
        return None
    found: set[str] = set()
    for step in (backend.normalizer, backend.pre_tokenizer):
        for part in _flat(json.loads(step.__getstate__())) if step is not None else ():
            if part["type"] == "Replace":  # of a space, by what SentencePiece has for it
                keeps = part["pattern"] == {"String": " "} and len(part["content"]) == 1
            else:
                keeps = part["type"] in _KEEPING and part.get("behavior") != "Removed"
            if not keeps:
                return None
            found.add(part["type"])
    return found if "ByteLevel" in found or model.byte_fallback else None


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A step and the steps that it consists of."""
    yield step
    for part in [*step.get("normalizers", ()), *step.get("pretokenizers", ())]:
        yield from _flat(part)


def _pieces(backend: Any, byte_level: bool) -> Iterator[bytes]:
    """The bytes of every token."""
    known = {character: byte for byte, character in bytes_to_unicode().items()}
    for token in backend.get_vocab(False):
        if byte_level:
            yield bytes(known[character] for character in token if character in known)
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            yield bytes([int(token[3:5], 16)])
        else:
            yield token.encode()
    for added in backend.get_added_tokens_decoder().values():
        yield added.content.encode()
