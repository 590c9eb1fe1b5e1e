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
from typing import Any, Final, NamedTuple

from ..validation import ErrorWrapper
from .call_patterns import pattern_for
from .literals import LiteralReader, NotACallError, Raw
from .values import read_arguments, read_json

Call = tuple[str, dict[str, Any]]  # the name, and arguments that are not typed yet
Schemas = Mapping[str, Any]  # the schemas of the arguments, by the names of the tools

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
    json = _JSON.match(body)
    position = json.end() if json else 0
    calls: list[Call] = []
    try:
        while not calls or body[position:].strip():
            if json:
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
            tail_start = -1
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


# A closing tag at the end of a value whose own closing tag is missing.
_OTHER_END: Final = re.compile(r"\n?</([\w:.｜-]+)\s*/?>\Z")


class _TagPatterns(NamedTuple):
    """The regular expressions of calls with tags.

    Attributes:
        head: the text before a call.
        key, key_tag: the text before a value, with and without leading white space.
        value_end: the text after a value.
        tail, last_tail, loose_tail: the text after a call: alone, with the beginning of another
            call or the end of the text behind it, and with surplus ends of values before it.
    """

    head: re.Pattern[str]
    key: re.Pattern[str]
    key_tag: re.Pattern[str]
    value_end: re.Pattern[str]
    tail: re.Pattern[str]
    last_tail: re.Pattern[str]
    loose_tail: re.Pattern[str]


@dataclass(frozen=True)
class TaggedCalls:
    """The syntax of calls with a tag for each argument, whose value is bare text.

    A value may contain the text of its own closing tag, as this line contains </parameter>. It ends
    where a tag of the call follows, and as many tags have ended in it as have begun. If closing
    tags are missing, arguments do not nest: the tag of another argument of the tool ends a value.

    Attributes:
        head, tail: the text around a call; the head contains {name}. Without a tail, the family's
            marker ends the call.
        key, value_end: the text around a value; the key contains {key}, and maybe {text}, which is
            true for a string.
    """

    head: str
    key: str
    value_end: str
    tail: str = ""

    @cached_property
    def _patterns(self) -> _TagPatterns:
        head = rf"\s*{pattern_for(self.head)}"
        tail = rf"\s*{pattern_for(self.tail)}"
        newline = "\n?" if self.value_end.startswith("\n") else ""
        value_end = newline + pattern_for(self.value_end.strip())
        loose_tail = rf"(?:\s*{value_end})*{tail}"
        return _TagPatterns(
            head=re.compile(head),
            key=re.compile(rf"\s*{pattern_for(self.key)}"),
            key_tag=re.compile(pattern_for(self.key)),
            value_end=re.compile(value_end),
            tail=re.compile(tail),
            last_tail=re.compile(tail + (rf"\s*(?:{head}|\Z)" if self.tail else r"\s*\Z")),
            loose_tail=re.compile(loose_tail if self.tail else rf"{loose_tail}\Z"),
        )

    @property
    def beginning(self) -> str:
        """A pattern for the beginning of a call with arguments."""
        return self._patterns.head.pattern + self._patterns.key.pattern

    def read(
        self, body: str, position: int, schemas: Schemas, lenient: bool
    ) -> tuple[list[Call], int]:
        """Read the call at a position. Returns it and its end. Raises `NotACallError`."""
        patterns = self._patterns
        name, position, closes_itself = self._read_name(body, position, schemas)
        if closes_itself and not patterns.key.match(body, position):
            return [(name, {})], position
        arguments, position = self._read_arguments(
            body,
            position,
            parameters=_Parameters(schemas.get(name)),
            lenient=lenient,
        )
        tail = patterns.loose_tail if lenient else patterns.tail
        match = tail.match(body, position)
        if match is not None:
            position = match.end()
        rest = body[position:].lstrip()
        # A tag of an argument in the rest could not be read, so the rest is not text.
        key_start = self.key.partition("{")[0].rstrip("=")
        lacks_end = match is None and not lenient
        if lacks_end or rest.startswith(key_start) or (rest and not self.tail):
            raise NotACallError("no end")
        return [(name, arguments)], position

    def _read_name(self, body: str, position: int, schemas: Schemas) -> tuple[str, int, bool]:
        """Read the head of a call. Some models write the name into the tag of an argument.

        Returns the tool's name, the end of the head, and whether its tag closes itself (<.../>).
        Raises `NotACallError`.
        """
        patterns = self._patterns
        match = patterns.head.match(body, position) if self.tail or not position else None
        if match is not None:
            name = match["name"].strip()
            closes_itself = match[0].rstrip().endswith("/>")
            return name.rstrip("/ ") if closes_itself else name, match.end(), closes_itself
        match = patterns.key.match(body, position)
        if match is None or match["key"].strip() not in schemas:
            raise NotACallError("no call")
        return match["key"].strip(), match.end(), False

    def _read_arguments(
        self, body: str, position: int, parameters: _Parameters, lenient: bool
    ) -> tuple[dict[str, Any], int]:
        """Read the arguments that begin at a position. Returns them and their end."""
        key = self._patterns.key
        arguments: dict[str, Any] = {}
        match = key.match(body, position)
        while match is not None:
            name = match["key"].strip(" '")
            if not match[0].rstrip().endswith(">") and name not in parameters.all:
                break
            start = match.end()
            end, position = self._value_end(
                body,
                start,
                read_names={*arguments, name},
                parameters=parameters,
                lenient=lenient,
            )
            text = body[start : max(start, end)]
            # DeepSeek writes the type next to the key.
            arguments[name] = text if 'string="true"' in match[0] else Raw(text)
            match = key.match(body, position)
        return arguments, position

    def _value_end(
        self, body: str, start: int, read_names: set[str], parameters: _Parameters, lenient: bool
    ) -> tuple[int, int]:
        """Find the end of the value at `start`. Returns it, and the end of its closing tag.

        None of the arguments in `read_names` may follow. Raises `NotACallError`.
        """
        tags = [
            (match.start(), match["key"].strip())
            for match in self._patterns.key_tag.finditer(body, start)
        ]
        candidate = (len(body), len(body))  # the first end that is possible, but not certain
        for ends_before, match in enumerate(self._patterns.value_end.finditer(body, start)):
            value_end, tag_end = match.span()
            if not self._may_end_at(body, tag_end, read_names=read_names, lenient=lenient):
                continue
            # A closing tag that belongs to a tag inside the value is part of the value. So are
            # tags of required arguments, unless they come again after the value.
            opened_inside = [name for position, name in tags if position < value_end]
            follow = {name for position, name in tags if position >= tag_end}
            still_required = parameters.required - read_names - follow
            loses_one = not still_required.isdisjoint(opened_inside)
            if len(opened_inside) <= ends_before and not loses_one:
                return value_end, tag_end
            candidate = min(candidate, (value_end, tag_end))
        if not lenient:
            raise NotACallError("no end")
        # The value's closing tag is missing: it ends before the next tag of the call.
        next_tag = self._next_tag(body, start, tags=tags, names=parameters.all - read_names)
        if candidate[0] < next_tag:
            return candidate
        return start + len(_without_other_ends(body[start:next_tag])), next_tag

    def _may_end_at(self, body: str, tag_end: int, read_names: set[str], lenient: bool) -> bool:
        """Whether a value may end with a closing tag: a new argument or the call's end follows."""
        next_key = self._patterns.key.match(body, tag_end)
        if next_key is not None and next_key["key"].strip() not in read_names:
            return True
        if not lenient:
            return self._patterns.last_tail.match(body, tag_end) is not None
        return bool(self._patterns.loose_tail.match(body, tag_end)) or not body[tag_end:].strip()

    def _next_tag(
        self, body: str, start: int, tags: list[tuple[int, str]], names: frozenset[str]
    ) -> int:
        """Find the next tag of the call: of an argument in `names`, or the tail."""
        tag_names = [name for _, name in tags]
        positions = []
        for position, name in tags:
            starts_line = body[start:position].rstrip(" \t")[-1:] in ("", "\n")
            if name in names and (tag_names.count(name) == 1 or starts_line):
                positions.append(position)
        match = self._patterns.last_tail.search(body, start)
        if match is not None and self.tail:
            positions.append(match.start())
        return min(positions, default=len(body))


def _without_other_ends(text: str) -> str:
    """Remove the closing tags at the end of a text that close nothing in it."""
    value = text.rstrip()
    match = _OTHER_END.search(value)
    while match is not None and f"<{match[1]}" not in value:
        value = value[: match.start()]
        match = _OTHER_END.search(value)
    return value


class _Parameters:
    """The names of a tool's parameters in its schema: in order, as a set, and the required ones."""

    def __init__(self, schema: Any) -> None:
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        required = schema.get("required") if isinstance(schema, Mapping) else None
        self.names = list(properties) if isinstance(properties, Mapping) else []
        self.all = frozenset(self.names)
        self.required = frozenset(required if isinstance(required, list) else ()) & self.all


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
                arguments |= reader.positional_arguments(_Parameters(schemas.get(name)).names)
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
