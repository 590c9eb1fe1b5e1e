"""The syntax of each family's calls, for the parser and for the grammar of forced calls.

Each syntax reads the text between a family's markers into names and arguments, which `values`
types. A call that does not end as its family ends it is not a call yet: the marker behind it may be
part of one of its strings. At the end of the answer calls are read leniently, because models drop
closing tags and brackets, especially in long contexts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ..validation import ErrorWrapper
from .call_patterns import pattern_for
from .literals import LiteralReader, NotACallError
from .tagged_calls import TaggedCalls
from .values import Call, Parameters, Schemas, read_arguments, read_json

_FENCE: Final = r"\s*(?:```\w*\s*)?"  # some models put JSON into a block of code
_JSON: Final = re.compile(rf"{_FENCE}(?=\[?\s*\{{)")
_AFTER_JSON: Final = re.compile(r"[\s,;}\]`]*")  # separators and surplus brackets
# What mlx-lm's parsers raise for unexpected text.
_LIBRARY_ERRORS: Final = (
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
# Members of a JSON object that may hold the name, and the arguments, of a call.
_NAMES: Final = ("name", "function", "tool_name", "tool")
_ARGUMENTS: Final = ("arguments", "parameters", "args")


def read_calls(
    syntax: CallSyntax, body: str, schemas: Schemas, lenient: bool = False
) -> tuple[list[Call], str]:
    """Read the calls at the beginning of a text. Returns them and the rest of the text.

    Only `lenient` allows a rest.

    Raises `NotACallError` if there are none.
    """
    if isinstance(syntax, LibraryCalls):
        return syntax.calls(body, schemas), ""
    json_start = _JSON.match(body)
    position = 0 if json_start is None else json_start.end()
    calls: list[Call] = []
    try:
        while not calls or body[position:].strip():
            if json_start is not None:
                more, position = _read_json_calls(body, position, lenient)
            else:
                more, position = syntax.read(
                    body, position=position, schemas=schemas, lenient=lenient
                )
            calls += more
    except NotACallError:
        if not (calls and lenient):
            raise
    return calls, body[position:]


def _read_json_calls(body: str, position: int, lenient: bool) -> tuple[list[Call], int]:
    """Read the call in a JSON object, or the calls in a list of them, and return their end."""
    value, position = read_json(body, position, lenient)
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise NotACallError("no call")
    calls = [_named_call(member) for member in objects]
    return calls, _end_of(_AFTER_JSON, body, position)


def _end_of(pattern: re.Pattern[str], body: str, position: int) -> int:
    """Return the end of a pattern's match at a position; the position itself without a match."""
    match = pattern.match(body, position)
    return position if match is None else match.end()


def _named_call(call: Any) -> Call:
    """Read a call from a JSON object with a name. Raises `NotACallError`."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        call = call["function"]
    if not isinstance(call, Mapping):
        raise NotACallError("no object")
    name = next((call[key] for key in _NAMES if key in call), None)
    key = next((key for key in _ARGUMENTS if key in call), None)
    # Other members may be the arguments by another name.
    has_others = bool(set(call) - {*_NAMES, "type", "id"})
    if not isinstance(name, str) or (key is None and has_others):
        raise NotACallError("no name")
    return str(name), read_arguments(call.get(key))


@dataclass(frozen=True)
class JsonCalls:
    """The syntax of calls whose arguments are JSON.

    Attributes:
        head, tail: the text around the arguments; the head contains {name}.
        name: a regular expression for the head; empty if the name is part of the JSON.
    """

    head: str = '\n{"name": "{name}", "arguments": '
    tail: str = "}\n"
    name: str = ""

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The patterns of the head and the tail."""
        tail = _AFTER_JSON.pattern + pattern_for(self.tail.strip("\n`"))
        return re.compile(rf"\s*{self.name or '(?!)'}{_FENCE}"), re.compile(tail)

    def read(
        self, body: str, position: int, schemas: Schemas, lenient: bool
    ) -> tuple[list[Call], int]:
        """Read the call at a position. Returns it and its end. Raises `NotACallError`."""
        head, tail = self._patterns
        match = head.match(body, position)
        if match is None:
            raise NotACallError("no call")
        position = match.end()
        arguments = None
        has_no_arguments = bool(self.tail and tail.match(body, position))
        if not has_no_arguments and position < len(body):
            tail_start = -1  # where broken JSON must end
            if lenient and self.tail:
                tail_start = body.find(self.tail.strip("\n`"), position)
            text = body if tail_start < 0 else body[:tail_start].rstrip("\n `")
            arguments, position = read_json(text, position, lenient)
        call = (match["name"].strip(), read_arguments(arguments))
        if tail.match(body, position):
            return [call], _end_of(tail, body, position)
        if not (lenient or head.match(body, position)):
            raise NotACallError("no end")
        return [call], _end_of(_AFTER_JSON, body, position)


@dataclass(frozen=True)
class LiteralCalls:
    """The syntax of calls like name{key:value} or name(key=value), with nested literals.

    Attributes:
        name: a regular expression for the name and the bracket after it.
        separator, close: what follows a key, and what follows the last argument. If the separator
            is "=", keys may be missing as in Python: values belong to the tool's parameters in
            order.
        quote: the quote of strings without escapes; Python's and JSON's are read as well.
    """

    name: str
    separator: str
    close: str
    quote: str = ""

    def read(
        self, body: str, position: int, schemas: Schemas, lenient: bool
    ) -> tuple[list[Call], int]:
        """Read the call at a position. Returns it and its end. Raises `NotACallError`."""
        match = re.compile(rf"[\s,\[]*{self.name}").match(body, position)
        if match is None:
            raise NotACallError("no call")
        name = match["name"].strip()
        reader = LiteralReader(body, match.end(), quote=self.quote, lenient=lenient)
        arguments: dict[str, Any] = {}
        with ErrorWrapper(NotACallError, "nested too deeply", (RecursionError,)):
            if self.separator == "=":
                arguments |= reader.positional_arguments(Parameters(schemas.get(name)).names)
            arguments |= reader.members(self.separator, self.close)
        end = _end_of(re.compile(r"[\s\]]*"), body, reader.position)
        return [(name, arguments)], end


@dataclass(frozen=True)
class LibraryCalls:
    """The syntax of a family that is not described here: a parser of mlx-lm reads its calls."""

    parser: Callable[[str, Any], Any]

    def calls(self, body: str, schemas: Schemas) -> list[Call]:
        """Read the calls in a text. Raises `NotACallError`."""
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in schemas.items()
        ]
        with ErrorWrapper(NotACallError, "not a call", _LIBRARY_ERRORS):
            result = self.parser(body, tools)
        calls = result if isinstance(result, list) else [result]
        if not calls:
            raise NotACallError("no call")
        return [_named_call(call) for call in calls]


CallSyntax = JsonCalls | TaggedCalls | LiteralCalls | LibraryCalls
