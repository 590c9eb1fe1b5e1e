"""How families write calls. One description serves the parser and the grammar of forced calls.

Each syntax reads the text between a family's markers into names and arguments, which `values`
types. A call that has not ended as its family ends it is not a call: the marker behind it may be a
part of one of its strings. At the end of the answer it is read `lenient`: models drop closing tags
and brackets, in long contexts above all.
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

_FENCE: Final = r"\s*(?:```\w*\s*)?"  # some models write a block of code
_JSON: Final = re.compile(rf"{_FENCE}(?=\[?\s*\{{)")
_AFTER_JSON: Final = re.compile(r"[\s,;}\]`]*")  # separators, and brackets too many
# What mlx-lm's parsers raise for a text that is not as they expect.
_RAISED: Final = (AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
_NAMES: Final = ("name", "function", "tool_name", "tool")
_ARGUMENTS: Final = ("arguments", "parameters", "args")


def read_calls(
    syntax: CallSyntax, body: str, schemas: Schemas, lenient: bool = False
) -> tuple[list[Call], str]:
    """The calls that a text begins with, and the rest of it, which only `lenient` allows.

    Raises `NotACallError` if there are none.
    """
    if isinstance(syntax, LibraryCalls):
        return syntax.calls(body, schemas), ""
    json = _JSON.match(body)
    found, at = list[Call](), json.end() if json else 0
    try:
        while not found or body[at:].strip():
            calls, at = (
                _json_calls(body, at, lenient) if json else syntax.read(body, at, schemas, lenient)
            )
            found += calls
    except NotACallError:
        if not (found and lenient):
            raise
    return found, body[at:]


def _json_calls(body: str, at: int, lenient: bool) -> tuple[list[Call], int]:
    """The call of an object, or those of a list."""
    value, at = read_json(body, at, lenient)
    calls = [_named_call(one) for one in (value if isinstance(value, list) else [value])]
    after = _AFTER_JSON.match(body, at)
    return calls or _no_call(), at if after is None else after.end()


def _named_call(found: Any) -> Call:
    """The call of an object with a name. Raises `NotACallError`."""
    if isinstance(found, Mapping) and isinstance(found.get("function"), Mapping):
        found = found["function"]
    if not isinstance(found, Mapping):
        raise NotACallError("no object")
    name = next((found[key] for key in _NAMES if key in found), None)
    key = next((key for key in _ARGUMENTS if key in found), None)
    # Other members may be the arguments by another name.
    if not isinstance(name, str) or (key is None and set(found) - {*_NAMES, "type", "id"}):
        raise NotACallError("no name")
    return str(name), read_arguments(found.get(key))


def _no_call() -> Any:
    raise NotACallError("no call")


# Tags as models write them: </parameter>, </parameter/>, </parameter=path>, <parameter=path
_CLOSING: Final = r"</\1\\s*/?(?:=[^<>\\s]*)?\\s*(?:>|(?=\\n|\\Z))"
_ENDING: Final = r"\1(?:[^\\S\\n]*/?>|\\n)"


def _pattern(text: str) -> str:
    """A pattern for text with {name} or {key}, in which white space and small slips are free."""
    pattern = re.escape(text.strip()).replace(r'\ string="\{text\}"', "")
    pattern = re.sub(r"(</\w+>)\\\n(<\w+>)$", r"(?:\1\\s*(?:\2)?|\\s*\2)", pattern)  # one is enough
    pattern = re.sub("</([^<>]+)>", _CLOSING, pattern)
    pattern = pattern.replace("｜DSML｜", "(?:[｜|]+DSML[｜|]+)?").replace("atem:", "(?:atem:)?")
    for group, characters in (("name", r"[^\s<>\"{}]+"), ("key", r"[^<>\"\n]+")):
        named = rf"(?P<{group}>{characters})"
        attribute = rf"[^<>]*?\bname\s*=\s*[\"']?(?P<{group}>[^<>\"'\n]+)[\"']?[^<>\n]*?"
        pattern = pattern.replace(rf'name="\{{{group}\}}"', attribute)
        pattern = pattern.replace(rf"=\{{{group}\}}", rf"(?:=|\s+(?:name=)?)[\"']?{named}[\"']?")
        pattern = pattern.replace(rf"\{{{group}\}}", named)
        pattern = re.sub(rf"(\(\?P<{group}>.*)>$", _ENDING, pattern, flags=re.DOTALL)
    pattern = re.sub(r"(?:\\[ \n])+", r"\\s*", pattern)
    return pattern + ("\n?" if text.endswith("\n") else "")


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
        tail = _AFTER_JSON.pattern + _pattern(self.tail.strip("\n`"))
        return re.compile(rf"\s*{self.name or '(?!)'}{_FENCE}"), re.compile(tail)

    def read(self, body: str, at: int, schemas: Schemas, lenient: bool) -> tuple[list[Call], int]:
        """The call at a place, and where it ends. Raises `NotACallError`."""
        (head, tail), arguments = self._patterns, None
        match = head.match(body, at) or _no_call()
        at = match.end()
        if not (self.tail and tail.match(body, at)) and at < len(body):
            last = body.find(self.tail.strip("\n`"), at) if lenient and self.tail else -1
            text = body if last < 0 else body[:last].rstrip("\n `")
            arguments, at = read_json(text, at, lenient)
        end = tail.match(body, at)
        if end is None and not (lenient or head.match(body, at)):
            raise NotACallError("no end")
        end = end or _AFTER_JSON.match(body, at)
        call = match["name"].strip(), read_arguments(arguments)
        return [call], at if end is None else end.end()


_OTHER_END: Final = re.compile(r"\n?</([\w:.｜-]+)\s*/?>\Z")  # of a value whose own is missing


@dataclass(frozen=True)
class TaggedCalls:
    """Calls with a tag for each argument, whose value is bare text.

    A value may have the text of its own end, as this line has </parameter>. It ends where a tag of
    the call follows, and as many tags have ended in it as have begun. Where ends are missing,
    arguments do not nest: the tag of another argument of the tool ends a value.

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
        head, key, tail = (rf"\s*{_pattern(one)}" for one in (self.head, self.key, self.tail))
        newline = "\n?" if self.value_end.startswith("\n") else ""
        end = newline + _pattern(self.value_end.strip())
        last = tail + (rf"\s*(?:{head}|\Z)" if self.tail else r"\s*\Z")
        return tuple(map(re.compile, (head, key, end, tail, last)))

    @cached_property
    def _lenient(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Those of a key's tag, and of a tail behind ends too many."""
        _, _, end, tail, _ = self._patterns
        loose = rf"(?:\s*{end.pattern})*{tail.pattern}" + ("" if self.tail else r"\Z")
        return re.compile(_pattern(self.key)), re.compile(loose)

    @property
    def beginning(self) -> str:
        """A pattern for the beginning of a call with arguments."""
        head, key, *_ = self._patterns
        return head.pattern + key.pattern

    def read(self, body: str, at: int, schemas: Schemas, lenient: bool) -> tuple[list[Call], int]:
        """The call at a place, and where it ends. Raises `NotACallError`."""
        head, key, _, tail, _ = self._patterns
        match = head.match(body, at) if self.tail or not at else None
        name = match["name"].strip() if match else ""
        if match is None:  # the name of a tool in an argument's tag
            match = key.match(body, at) or _no_call()
            name = match["key"].strip() if match["key"].strip() in schemas else _no_call()
        elif match[0].rstrip().endswith("/>"):
            name = name.rstrip("/ ")
            if not key.match(body, match.end()):  # the tag ends itself
                return [(name, {})], match.end()
        arguments, at = self._arguments(body, match.end(), _Names(schemas.get(name)), lenient)
        end = (self._lenient[1] if lenient else tail).match(body, at)
        at = at if end is None else end.end()
        # The tag of an argument that cannot be read is no text behind the call.
        lost = body[at:].lstrip().startswith(self.key.partition("{")[0].rstrip("="))
        if (end is None and not lenient) or lost or (not self.tail and body[at:].strip()):
            raise NotACallError("no end")
        return [(name, arguments)], at

    def _arguments(
        self, body: str, at: int, names: _Names, lenient: bool
    ) -> tuple[dict[str, Any], int]:
        """The arguments that begin at a place, and where they end."""
        found: dict[str, Any] = {}
        while match := self._patterns[1].match(body, at):
            name, start = match["key"].strip(" '"), match.end()
            if not match[0].rstrip().endswith(">") and name not in names.all:
                break
            end, at = self._value_end(body, start, {*found, name}, names, lenient)
            text = body[start : max(start, end)]
            # DeepSeek writes the type beside the key.
            found[name] = text if 'string="true"' in match[0] else Raw(text)
        return found, at

    def _value_end(
        self, body: str, start: int, given: set[str], names: _Names, lenient: bool
    ) -> tuple[int, int]:
        """Where the value at `start` ends, after which no key of `given` comes, and its end."""
        _, key, end, tail, last = self._patterns
        tail = self._lenient[1] if lenient else last
        tags = [(one.start(), one["key"].strip()) for one in self._lenient[0].finditer(body, start)]
        possible = len(body), len(body)
        for closed, match in enumerate(end.finditer(body, start)):
            border, after = match.span()
            more = key.match(body, after)
            follows = more is not None and more["key"].strip() not in given
            if follows or tail.match(body, after) or (lenient and not body[after:].strip()):
                # An end that belongs to a tag of the value is the value's.
                inside = [tag for at, tag in tags if at < border]
                lost = {*inside} & (names.required - given) - {
                    tag for at, tag in tags if at >= after
                }
                if len(inside) <= closed and not lost:
                    return border, after
                possible = min(possible, (border, after))
        if not lenient:
            raise NotACallError("no end")
        # The value's own end is missing: it ends before the next tag of the call.
        only = [tag for _, tag in tags]
        borders = [
            at
            for at, tag in tags
            if tag in names.all - given
            and (only.count(tag) == 1 or body[start:at].rstrip(" \t")[-1:] in ("", "\n"))
        ]
        borders += [match.start() for match in [last.search(body, start)] if match and self.tail]
        border = min(borders, default=len(body))
        if possible[0] < border:
            return possible
        value = body[start:border].rstrip()
        while (other := _OTHER_END.search(value)) and f"<{other[1]}" not in value:
            value = value[: other.start()]
        return start + len(value), border


class _Names:
    """The names of a tool's parameters, as its schema has them."""

    def __init__(self, schema: Any) -> None:
        schema = schema if isinstance(schema, Mapping) else {}
        properties, required = schema.get("properties"), schema.get("required")
        self.all = frozenset(properties if isinstance(properties, Mapping) else ())
        self.required = frozenset(required if isinstance(required, list) else ()) & self.all


@dataclass(frozen=True)
class LiteralCalls:
    """Calls as name{key:value} or name(key=value), with nested literals.

    Attributes:
        name: a regular expression for the name and the bracket after it.
        separator, close: what follows a key, and the last argument. Before a separator of "=", keys
            may be missing, as in Python: the values are those of the tool's parameters in order.
        quote: the quote of strings without escapes; those of Python and JSON are read, too.
    """

    name: str
    separator: str
    close: str
    quote: str = ""

    def read(self, body: str, at: int, schemas: Schemas, lenient: bool) -> tuple[list[Call], int]:
        """The call at a place, and where it ends. Raises `NotACallError`."""
        match = re.compile(rf"[\s,\[]*{self.name}").match(body, at) or _no_call()
        reader = LiteralReader(body, match.end(), self.quote, lenient)
        name = match["name"].strip()
        schema = schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        names = list(properties) if isinstance(properties, Mapping) else []
        with ErrorWrapper(NotACallError, "nested too deeply", (RecursionError,)):
            members = reader.arguments(names) if self.separator == "=" else {}
            members |= reader.members(self.separator, self.close)
        end = re.compile(r"[\s\]]*").match(body, reader.at)
        return [(name, members)], reader.at if end is None else end.end()


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
        with ErrorWrapper(NotACallError, "not a call", _RAISED):
            found = self.parser(body, tools)
        calls = found if isinstance(found, list) else [found]
        return [_named_call(one) for one in calls] or _no_call()


CallSyntax = JsonCalls | TaggedCalls | LiteralCalls | LibraryCalls
