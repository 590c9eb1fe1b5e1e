"""Reads literals of Python and JSON, with the mistakes that models make."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from ..errors import DFlashError


class NotACallError(DFlashError):
    """The text does not parse as a call."""


class Raw(str):
    """A value that the model wrote as bare text, so that the schema decides its type."""

    __slots__ = ()


# A string in quotes. Some models escape no quotes inside, so a quote ends the string only before
# something that may follow a string.
_STRING: Final = re.compile(
    r"""(["'])((?:\\.|(?!\1)[^\\]|\1(?!\s*(?:[,:)}\]]|$|\1[\w-]+\1\s*:)))*)\1""", re.DOTALL
)
# Python's strings in three quotes, and those with letters before the quote, such as r"\d+".
_PYTHON_STRING: Final = re.compile(
    r"""(?P<prefix>[rRuUbBfF]{0,2})(\"{3}|'{3})(?P<text>(?:\\.|(?!\2)[^\\])*)\2"""
    r"""|(?P<short_prefix>[rRuUbBfF]{1,2})(["'])(?P<short_text>(?:\\.|(?!\5)[^\\])*)\5""",
    re.DOTALL,
)
# Strings in a row, which Python joins, and one string of a row. %d is the number of the quote's
# group.
_QUOTED: Final = r"""[rRuUbBfF]{0,2}(["'])(?:\\.|(?!\%d)[^\\])*\%d"""
_STRING_ROW: Final = re.compile(
    rf"(?:{_QUOTED % (1, 1)}\s+)+{_QUOTED % (2, 2)}(?=\s*(?:[,)}}\]]|\Z))", re.DOTALL
)
_STRING_OF_ROW: Final = re.compile(
    r"""(?P<prefix>[rRuUbBfF]{0,2})(["'])(?P<text>(?:\\.|(?!\2)[^\\])*)\2""", re.DOTALL
)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES: Final = dict(zip("nrtbfav\"'\\/", "\n\r\t\b\f\a\v\"'\\/", strict=True)) | {"\n": ""}
# What ends the arguments of a Python call that have no keywords.
_KEYWORD_OR_END: Final = re.compile(r"""\s*(?:\)|\Z|(?:[\w.-]+|(["'])[\w.-]+\1)\s*=(?!=))""")
_BRACKETS: Final = re.compile(r"[()\[\]{}<>\n]")
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


def _unescape(match: re.Match[str]) -> str:
    """Return the character of an escape sequence."""
    code = match[1]
    if len(code) == 1:
        return _ESCAPES.get(code, match[0])
    number = int(code[1:], 16)
    return chr(number) if number <= sys.maxunicode else match[0]


def _string_value(prefix: str, text: str) -> str:
    """Return the value of a Python string with this prefix, such as the r of r"text"."""
    return text if "r" in prefix.lower() else _ESCAPE.sub(_unescape, text)


class LiteralReader:
    """Reads literals of Python and JSON. Its methods raise `NotACallError`.

    Args:
        text: the literals.
        position: where to begin.
        quote: one more quote, for strings without escapes.
        lenient: whether closing brackets may be missing behind a value.

    Attributes:
        position: the end of what has been read.
    """

    def __init__(
        self, text: str, position: int = 0, quote: str = "", lenient: bool = False
    ) -> None:
        self.position = position
        self._text = text
        self._quote = quote
        self._lenient = lenient

    def positional_arguments(self, names: Sequence[str]) -> dict[str, Any]:
        """Read the arguments of a Python call that have no keywords, after its opening bracket.

        They belong to these parameters, in order.
        """
        arguments: dict[str, Any] = {}
        for name in names:
            if _KEYWORD_OR_END.match(self._text, self.position):
                break
            arguments[name] = self.value(")")
            self._skip(",")
        return arguments

    def members(self, separator: str, close: str) -> dict[str, Any]:
        """Read the members of an object, after its opening bracket."""
        members: dict[str, Any] = {}
        while not (self._skip(close) or (members and self._lacks_bracket())):
            key = self._string()
            if key is None:
                key = self._word(separator)
                if not key or _BRACKETS.search(key):
                    raise NotACallError("no key")
            if not self._skip(separator):
                raise NotACallError("no value")
            members[key] = self.value(close)
            self._skip(",")
        return members

    def value(self, close: str) -> Any:
        """Read a value, which ends before a comma or `close`.

        A value without quotes or brackets is `Raw`.
        """
        string = self._string()
        if string is not None:
            return string
        if self._skip("{"):
            return self.members(":", "}")
        if self._skip("("):
            return self._tuple()
        if self._skip("["):
            return self._list()
        word = self._word("," + close)
        return Raw(_PYTHON_WORDS.get(word, word))

    def _list(self) -> list[Any]:
        """Read a list, after its opening bracket."""
        items: list[Any] = []
        while not (self._skip("]") or (items and self._lacks_bracket())):
            items.append(self.value("]"))
            self._skip(",")
        return items

    def _tuple(self) -> Any:
        """Read a tuple as a list, after its opening bracket.

        A single value without a comma is not a tuple, and returned itself.
        """
        items: list[Any] = []
        has_comma = False
        while not self._skip(")"):
            items.append(self.value(")"))
            has_comma = self._skip(",")
        return items[0] if len(items) == 1 and not has_comma else items

    def _lacks_bracket(self) -> bool:
        """Whether the closing bracket is missing here: another one follows, or nothing."""
        return self._lenient and self._text[self.position : self.position + 1] in (
            "",
            "}",
            "]",
            ")",
        )

    def _string(self) -> str | None:
        """Read a string in quotes; None if there is none."""
        if self._quote and self._skip(self._quote):  # between two of the model's own quotes
            start = self.position
            end = self._text.find(self._quote, start)
            if end < 0:
                raise NotACallError("no end")
            self.position = end + len(self._quote)
            return self._text[start:end]
        self._skip_spaces()
        row = _STRING_ROW.match(self._text, self.position)  # strings that Python joins
        if row is not None:
            self.position = row.end()
            strings = _STRING_OF_ROW.finditer(row[0])
            return "".join(_string_value(string["prefix"], string["text"]) for string in strings)
        python = _PYTHON_STRING.match(self._text, self.position)  # three quotes, or a prefix
        if python is not None:
            self.position = python.end()
            if python["short_prefix"] is not None:
                return _string_value(python["short_prefix"], python["short_text"])
            return _string_value(python["prefix"], python["text"])
        match = _STRING.match(self._text, self.position)  # JSON's, in either quote
        if match is None:
            return None
        self.position = match.end()
        return _ESCAPE.sub(_unescape, match[2])

    def _word(self, ends: str) -> str:
        """Read text up to one of the characters in `ends`."""
        start = self.position
        if self._lenient:
            ends += "}]"
        while self.position < len(self._text) and self._text[self.position] not in ends:
            self.position += 1
        word = self._text[start : self.position].strip()
        is_cut = self.position == len(self._text) and not (self._lenient and word)
        if is_cut or word[:1] in ('"', "'"):
            raise NotACallError("no end")
        return word

    def _skip(self, token: str) -> bool:
        """Skip white space, and a token if it follows. Returns whether it does."""
        self._skip_spaces()
        if not self._text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def _skip_spaces(self) -> None:
        while self.position < len(self._text) and self._text[self.position].isspace():
            self.position += 1
