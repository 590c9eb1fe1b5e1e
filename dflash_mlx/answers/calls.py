"""How families write calls. One description serves the parser and the grammar of forced calls.

Each syntax reads the text between a family's markers into names and arguments, which `values`
types. A call that has not ended as its family ends it is not a call: the marker behind it may be a
part of one of its strings. `lenient` takes it at the end of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ..validation import ErrorWrapper
from .values import LiteralReader, NotACallError, Raw, read_arguments, read_json

Call = tuple[str, dict[str, Any]]  # a name, and arguments that are not typed yet
Schemas = Mapping[str, Any]  # of the arguments, by the names of the tools

_SEPARATORS: Final = re.compile(r"[\s,;]*")
_ARGUMENTS: Final = ("arguments", "parameters", "args")


def read_calls(
    syntax: CallSyntax, body: str, schemas: Schemas, lenient: bool = False
) -> tuple[list[Call], str]:
    """The calls that a text begins with, and the rest of it, which only `lenient` allows.

    Raises `NotACallError` if there are none.
    """
    if isinstance(syntax, LibraryCalls):
        return syntax.calls(body, schemas), ""
    is_json = body.lstrip()[:1] in ("{", "[") and not isinstance(syntax, LiteralCalls)
    read = _json_calls if is_json else syntax.read
    found: list[Call] = []
    at = 0
    try:
        while not found or body[at:].strip():
            calls, at = read(body, at, lenient)
            found += calls
    except NotACallError:
        if not (found and lenient):
            raise
    return found, body[at:]


def _json_calls(body: str, at: int, lenient: bool) -> tuple[list[Call], int]:
    """The call of an object, or those of a list."""
    value, at = read_json(body, at)
    separator = _SEPARATORS.match(body, at)
    calls = [_named_call(one) for one in (value if isinstance(value, list) else [value])]
    return calls or _no_call(), at if separator is None else separator.end()


def _named_call(found: Any) -> Call:
    """The call of an object with a name. Raises `NotACallError`."""
    if isinstance(found, Mapping) and isinstance(found.get("function"), Mapping):
        found = found["function"]
    if not isinstance(found, Mapping):
        raise NotACallError("no object")
    name = found.get("name", found.get("function"))
    key = next((key for key in _ARGUMENTS if key in found), None)
    # Other members may be the arguments by another name.
    if not isinstance(name, str) or (key is None and set(found) - {"name", "type", "id"}):
        raise NotACallError("no name")
    return name, read_arguments(found.get(key))


def _no_call() -> Any:
    raise NotACallError("no call")


def _pattern(text: str) -> re.Pattern[str]:
    """Text with {name} or {key}, in which white space and quotes of attributes are free."""
    pattern = re.escape(text.strip()).replace(r'\ string="\{text\}"', "")
    for group in ("name", "key"):
        name = r"(?P<name>[^\s<>\"{}]+)" if group == "name" else r"(?P<key>[^<>\"\n]+)"
        attribute = rf"[^>]*?\bname\s*=\s*[\"']?(?P<{group}>[^<>\"']+)[\"']?[^>]*?"
        pattern = pattern.replace(rf'name="\{{{group}\}}"', attribute)
        pattern = pattern.replace(rf"\{{{group}\}}", name)
    pattern = re.sub(r"(?:\\[ \n])+", r"\\s*", pattern)
    return re.compile(rf"\s*{pattern}" + ("\n?" if text.endswith("\n") else ""))


@dataclass(frozen=True)
class JsonCalls:
    """Calls whose arguments are JSON.

    Attributes:
        head, tail: the text around the arguments; the head has the {name}.
        name: a regular expression for the head; empty if the name is a part of the JSON.
    """

    head: str = '\n{"name": "{name}", "arguments": '
    tail: str = "}\n"
    name: str = ""

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        return re.compile(rf"\s*{self.name or '(?!)'}\s*"), _pattern(self.tail)

    def read(self, body: str, at: int, lenient: bool) -> tuple[list[Call], int]:
        """The call at a place, and where it ends. Raises `NotACallError`."""
        (head, tail), arguments = self._patterns, None
        match = head.match(body, at) or _no_call()
        at = match.end()
        if not (self.tail and tail.match(body, at)) and at < len(body):
            arguments, at = read_json(body, at)
        end = tail.match(body, at)
        if end is None and not lenient:
            raise NotACallError("no end")
        call = match["name"].strip(), read_arguments(arguments)
        return [call], at if end is None else end.end()


@dataclass(frozen=True)
class TaggedCalls:
    """Calls with a tag for each argument, whose value is bare text.

    A value may have the text of its own end, as this line has </parameter>. It ends where a tag of
    the call follows.

    Attributes:
        head, tail: the text around a call; the head has the {name}. Without a tail, the marker ends
            it.
        key, value_end: the text around a value; the first one has the {key}, and perhaps {text},
            true for a string.
    """

    head: str
    key: str
    value_end: str
    tail: str = ""

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        """Those of head, key, a value's end, tail, and the tail with what may follow."""
        head, key, tail = map(_pattern, (self.head, self.key, self.tail))
        newline = "\n?" if self.value_end.startswith("\n") else ""
        end = re.compile(newline + re.escape(self.value_end.strip()))
        more = rf"\s*(?:{head.pattern}|\Z)" if self.tail else r"\s*\Z"
        return head, key, end, tail, re.compile(tail.pattern + more)

    def read(self, body: str, at: int, lenient: bool) -> tuple[list[Call], int]:
        """The call at a place, and where it ends. Raises `NotACallError`."""
        head, _, _, tail, _ = self._patterns
        match = (head.match(body, at) if self.tail or not at else None) or _no_call()
        arguments, at = self._arguments(body, match.end(), lenient)
        end = tail.match(body, at)
        if (end is None and not lenient) or (not self.tail and body[at:].strip()):
            raise NotACallError("no end")
        return [(match["name"].strip(), arguments)], at if end is None else end.end()

    def _arguments(self, body: str, at: int, lenient: bool) -> tuple[dict[str, Any], int]:
        """The arguments that begin at a place, and where they end."""
        key = self._patterns[1]
        found: dict[str, Any] = {}
        while match := key.match(body, at):
            name, start = match["key"].strip(), match.end()
            end = self._value_end(body, start, {*found, name}, lenient)
            text = body[start : end.start()]
            # DeepSeek writes the type beside the key.
            found[name] = text if 'string="true"' in match[0] else Raw(text)
            at = end.end()
        return found, at

    def _value_end(self, body: str, start: int, keys: set[str], lenient: bool) -> re.Match[str]:
        """The end of the value at `start`, after which no key of `keys` comes."""
        _, key, end, tail, last = self._patterns
        tail = tail if lenient and self.tail else last
        opening = self.key.partition("{")[0]
        possible = []
        for closed, match in enumerate(end.finditer(body, start)):
            after = match.end()
            more = key.match(body, after)
            follows = more is not None and more["key"].strip() not in keys
            if follows or tail.match(body, after) or (lenient and not body[after:].strip()):
                # An end that belongs to a tag of the value is the value's.
                if body.count(opening, start, match.start()) <= closed:
                    return match
                possible.append(match)
        return possible[0] if possible else _no_call()


@dataclass(frozen=True)
class LiteralCalls:
    """Calls as name{key:value} or name(key=value), with nested literals.

    Attributes:
        name: a regular expression for the name and the bracket after it.
        separator, close: what follows a key, and the last argument.
        quote: the quote of strings without escapes; those of Python and JSON are read, too.
    """

    name: str
    separator: str
    close: str
    quote: str = ""

    def read(self, body: str, at: int, lenient: bool) -> tuple[list[Call], int]:
        """The call at a place, and where it ends. Raises `NotACallError`."""
        match = re.compile(rf"[\s,\[]*{self.name}").match(body, at) or _no_call()
        reader = LiteralReader(body, match.end(), self.quote)
        with ErrorWrapper(NotACallError, "nested too deeply"):
            members = reader.members(self.separator, self.close)
        end = re.compile(r"[\s\]]*").match(body, reader.at)
        return [(match["name"].strip(), members)], reader.at if end is None else end.end()


@dataclass(frozen=True)
class LibraryCalls:
    """Calls that a parser of mlx-lm reads: of families that are not described here."""

    parser: Callable[[str, Any], Any]

    def calls(self, body: str, schemas: Schemas) -> list[Call]:
        """The calls in a text. Raises `NotACallError`."""
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in schemas.items()
        ]
        with ErrorWrapper(NotACallError, "not a call"):
            found = self.parser(body, tools)
        calls = found if isinstance(found, list) else [found]
        return [_named_call(one) for one in calls] or _no_call()


CallSyntax = JsonCalls | TaggedCalls | LiteralCalls | LibraryCalls
