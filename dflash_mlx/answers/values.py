"""Arguments of calls as the model wrote them, typed by the schema of the tool.

Some families write values as bare text, where 123 may be a number or a string. The schema decides,
in whatever way it says it. JSON is read as other servers read it: line breaks may stand in strings,
and NaN, which is not JSON, is a string.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

from ..errors import DFlashError
from ..validation import ErrorWrapper

# Names that models and schemas use beside JSON schema's own.
_ALIASES: Final = {"str": "string", "text": "string", "enum": "string", "int": "integer"} | {
    "float": "number", "bool": "boolean", "dict": "object", "list": "array"
}  # fmt: skip
_ALL: Final = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_NAMES: Final = {str: "string", int: "integer", bool: "boolean", dict: "object"} | {
    list: "array", type(None): "null"
}  # fmt: skip
_COMBINATIONS: Final = ("anyOf", "oneOf", "allOf")


class NotACallError(DFlashError):
    """Text that does not parse as a call."""


class Raw(str):
    """A value written as bare text, which the schema types."""

    __slots__ = ()


def _number(text: str) -> Any:
    """A number with all its digits; text for one that JSON readers would make infinite."""
    return Decimal(text) if math.isfinite(float(text)) else text


_DECODER: Final = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=str)


def read_json(text: str, start: int = 0, lenient: bool = False) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends; `lenient`, one as models write it.

    Raises `NotACallError`.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        with ErrorWrapper(NotACallError, "not JSON", (ValueError, RecursionError)):
            return _DECODER.raw_decode(text, start)
    except NotACallError:
        if not (lenient and text[start : start + 1] in ("{", "[")):
            raise
    reader = LiteralReader(text, start, lenient=True)
    with ErrorWrapper(NotACallError, "nested too deeply", (RecursionError,)):
        return reader.value(""), reader.at


def read_arguments(arguments: Any, lenient: bool = False) -> dict[str, Any]:
    """The arguments that a call has as JSON, as JSON text, or not at all.

    Raises `NotACallError` for anything else.
    """
    if isinstance(arguments, str):
        text = arguments.strip()
        arguments, end = read_json(text, 0, lenient) if text else (None, 0)
        if text[end:].strip("} \n"):
            raise NotACallError("text behind the arguments")
    if arguments is None or arguments == []:
        return {}
    if not isinstance(arguments, dict):
        raise NotACallError("the arguments are not an object")
    return arguments


def typed_arguments(arguments: Mapping[str, Any], schema: Any) -> str:
    """The arguments as JSON text, each typed by the tool's schema. Raises `NotACallError`."""
    with ErrorWrapper(NotACallError, "not JSON", (ValueError, RecursionError)):
        typed = _typed(dict(arguments), schema, schema)
        text = json.dumps(typed, ensure_ascii=False, allow_nan=False)
    # Lone surrogates are not valid text.
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def allowed_types(
    schema: Any, root: Any, seen: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """The JSON types that a schema allows; `root` is the document of its references."""
    seen = {} if seen is None else seen  # by the schema's id: references may be cyclic
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return seen.get(id(schema), _ALL)
    found = seen[id(schema)] = _ALL
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        words = [kinds] if isinstance(kinds, str) else kinds
        names = {_ALIASES.get(str(word).lower(), str(word).lower()) for word in words}
        names |= {"integer"} if "number" in names else set()
        names |= {"null"} if schema.get("nullable") is True else set()
        found &= names & _ALL or _ALL
    if options := listed_values(schema):
        found &= frozenset(_NAMES.get(type(one), "number") for one in options)
    if "$ref" in schema:
        found &= allowed_types(_resolve(schema["$ref"], root), root, seen)
    for word in _COMBINATIONS:
        inner = schema.get(word)
        if isinstance(inner, list) and inner:
            sets = [allowed_types(one, root, seen) for one in inner]
            found &= frozenset.intersection(*sets) if word == "allOf" else frozenset().union(*sets)
    seen[id(schema)] = found
    return found


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that `enum` or `const` lists."""
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) else []


def _resolve(reference: Any, root: Any) -> Any:
    """The schema that a reference within the document names; None for others."""
    found = root
    for name in str(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if str(reference).startswith("#") else None


def _parts(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """A schema and those that it refers to or combines, the outermost first."""
    found: list[Mapping[str, Any]] = []
    rest, seen = [schema], set()
    while rest:
        one = rest.pop(0)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        found.append(one)
        rest += [_resolve(one["$ref"], root)] if "$ref" in one else []
        for word in _COMBINATIONS:
            rest += one[word] if isinstance(one.get(word), list) else []
    return found


def _typed(value: Any, schema: Any, root: Any) -> Any:
    """A value as its schema types it, and everything in it."""
    if isinstance(value, Raw):
        return _read_text(str(value), schema, root)
    if isinstance(value, dict | list):
        known: dict[str, Any] = {}
        for part in reversed(_parts(schema, root)):
            members = part.get("properties")
            known |= members if isinstance(members, Mapping) else {}
        word = "items" if isinstance(value, list) else "additionalProperties"
        others = next((part[word] for part in _parts(schema, root) if word in part), None)
        if isinstance(value, list):
            return [_typed(one, others, root) for one in value]
        return {key: _typed(one, known.get(key, others), root) for key, one in value.items()}
    if isinstance(value, Decimal):
        kinds = allowed_types(schema, root)
        whole = value == value.to_integral_value()
        return int(value) if whole and "number" not in kinds else float(value)
    return value


def _read_text(text: str, schema: Any, root: Any) -> Any:
    """The value of bare text: a string unless the schema allows what it is otherwise."""
    kinds = allowed_types(schema, root)
    listed = [one for part in _parts(schema, root) for one in listed_values(part)]
    if kinds == {"string"} or text in listed:
        return text
    value = _literal(text.strip(), guess="string" not in kinds)
    if isinstance(value, str):
        return text if "string" in kinds or not value else value
    value = _typed(value, schema, root)
    return text if "string" in kinds and _NAMES.get(type(value), "number") not in kinds else value


def _literal(text: str, guess: bool) -> Any:
    """The value of a JSON text; with `guess`, Python's spelling too; else the text."""
    with suppress(NotACallError):
        value, end = read_json(text)
        if end == len(text):
            return value
    if not guess:
        return text
    word = text.lower().replace("none", "null")
    if word in ("true", "false", "null"):
        return json.loads(word)
    with suppress(ValueError):
        return int(text, 0)  # 0x1F, 1_000
    with suppress(ValueError):
        return _number(text)  # .5
    deep = ErrorWrapper(NotACallError, "nested too deeply", (RecursionError,))
    with suppress(NotACallError), deep:
        reader = LiteralReader(text)
        value = reader.value("")
        if reader.at == len(text):
            return value
    return text


# A quote ends a string where what follows a string follows it: some models escape none.
_STRING: Final = re.compile(
    r"""(["'])((?:\\.|(?!\1)[^\\]|\1(?!\s*(?:[,:)}\]]|$|\1[\w-]+\1\s*:)))*)\1""", re.DOTALL
)
# Python's strings in three quotes, and those with letters before the quote: r"\d+".
_PYTHON_STRING: Final = re.compile(
    r"""([rRuUbBfF]{0,2})(\"{3}|'{3})((?:\\.|(?!\2)[^\\])*)\2"""
    r"""|([rRuUbBfF]{1,2})(["'])((?:\\.|(?!\5)[^\\])*)\5""",
    re.DOTALL,
)
# Strings in a row, which Python joins.
_ONE: Final = r"""[rRuUbBfF]{0,2}(["'])(?:\\.|(?!\%d)[^\\])*\%d"""
_ROW: Final = re.compile(
    rf"(?:{_ONE % (1, 1)}\s+)+{_ONE % (2, 2)}(?=\s*(?:[,)}}\]]|\Z))", re.DOTALL
)
_OF_ROW: Final = re.compile(r"""([rRuUbBfF]{0,2})(["'])((?:\\.|(?!\2)[^\\])*)\2""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES: Final = dict(zip("nrtbfav\"'\\/", "\n\r\t\b\f\a\v\"'\\/", strict=True)) | {"\n": ""}
_KEYWORD_OR_END: Final = re.compile(r"""\s*(?:\)|\Z|(?:[\w.-]+|(["'])[\w.-]+\1)\s*=(?!=))""")
_BRACKETS: Final = re.compile(r"[()\[\]{}<>\n]")
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 1:
        return _ESCAPES.get(code, match[0])
    number = int(code[1:], 16)
    return chr(number) if number <= sys.maxunicode else match[0]


def _plain(letters: str, text: str) -> str:
    """The text of a Python string with these letters before its quote."""
    return text if "r" in letters.lower() else _ESCAPE.sub(_unescape, text)


class LiteralReader:
    """Reads literals as Python and JSON have them. Its methods raise `NotACallError`.

    Args:
        text: the literals.
        at: where to begin.
        quote: another quote, of strings without escapes.
        lenient: whether closing brackets may be missing behind a value.

    Attributes:
        at: the end of what was read.
    """

    def __init__(self, text: str, at: int = 0, quote: str = "", lenient: bool = False) -> None:
        self._text, self.at, self._quote, self._lenient = text, at, quote, lenient

    def arguments(self, names: Sequence[str]) -> dict[str, Any]:
        """The arguments of a Python call that have no keys, after its bracket, by these names."""
        found: dict[str, Any] = {}
        for name in names:
            if _KEYWORD_OR_END.match(self._text, self.at):
                break
            found[name] = self.value(")")
            self._take(",")
        return found

    def members(self, separator: str, close: str) -> dict[str, Any]:
        """The members of an object, after its opening bracket."""
        found: dict[str, Any] = {}
        while not (self._take(close) or (found and self._lacks_end())):
            key = self._string()
            if key is None:
                key = self._word(separator)
                if not key or _BRACKETS.search(key):
                    raise NotACallError("no key")
            if not self._take(separator):
                raise NotACallError("no value")
            found[key] = self.value(close)
            self._take(",")
        return found

    def value(self, close: str) -> Any:
        """A value, which ends before a comma or `close`; `Raw` without quotes or brackets."""
        string = self._string()
        if string is not None:
            return string
        if self._take("{"):
            return self.members(":", "}")
        if self._take("("):
            return self._tuple()
        if not self._take("["):
            word = self._word("," + close)
            return Raw(_PYTHON_WORDS.get(word, word))
        found: list[Any] = []
        while not (self._take("]") or (found and self._lacks_end())):
            found.append(self.value("]"))
            self._take(",")
        return found

    def _tuple(self) -> Any:
        """A tuple after its bracket, as a list; a value in brackets without a comma is itself."""
        found: list[Any] = []
        comma = False
        while not self._take(")"):
            found.append(self.value(")"))
            comma = self._take(",")
        return found[0] if len(found) == 1 and not comma else found

    def _lacks_end(self) -> bool:
        """Whether another bracket is here, or nothing, where brackets may be missing."""
        return self._lenient and self._text[self.at : self.at + 1] in ("", "}", "]", ")")

    def _string(self) -> str | None:
        """A string in quotes, if there is one."""
        if self._quote and self._take(self._quote):
            start, end = self.at, self._text.find(self._quote, self.at)
            if end < 0:
                raise NotACallError("no end")
            self.at = end + len(self._quote)
            return self._text[start:end]
        self._take("")
        row = _ROW.match(self._text, self.at)
        if row is not None:
            self.at = row.end()
            return "".join(_plain(piece[1], piece[3]) for piece in _OF_ROW.finditer(row[0]))
        match = _PYTHON_STRING.match(self._text, self.at)
        if match is not None:
            self.at = match.end()
            letters = match[1] or match[4] or ""
            return _plain(letters, match[3] if match[4] is None else match[6])
        match = _STRING.match(self._text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return _ESCAPE.sub(_unescape, match[2])

    def _word(self, ends: str) -> str:
        start = self.at
        ends += "}]" * self._lenient
        while self.at < len(self._text) and self._text[self.at] not in ends:
            self.at += 1
        word = self._text[start : self.at].strip()
        if (self.at == len(self._text) and not (self._lenient and word)) or word[:1] in ('"', "'"):
            raise NotACallError("no end")
        return word

    def _take(self, token: str) -> bool:
        """Skip white space, and a token if it is there."""
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1
        found = self._text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found
