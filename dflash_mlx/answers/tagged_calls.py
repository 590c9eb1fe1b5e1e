"""The syntax of calls with a tag for each argument, whose value is bare text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from .call_patterns import pattern_for
from .literals import NotACallError, Raw
from .values import Call, Parameters, Schemas

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
            parameters=Parameters(schemas.get(name)),
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
        # Without a tail, the markers contain a single call, whose head comes first.
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
        self, body: str, position: int, parameters: Parameters, lenient: bool
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
        self, body: str, start: int, read_names: set[str], parameters: Parameters, lenient: bool
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
            loses_required = not still_required.isdisjoint(opened_inside)
            if len(opened_inside) <= ends_before and not loses_required:
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
