"""The markers of an answer, and what each of them begins."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .families import AnswerFormat
from .marks import MARK
from .tagged_calls import TaggedCalls
from .values import Schemas

# The states of the parser, which are what its text is. A marker begins such a text.
NORMAL = "normal"
REASONING = "reasoning"
TOOL = "tool"
HEADER = "header"
# Other kinds of markers.
BARE = "bare"  # the beginning of a call without its start marker
MESSAGE = "message"  # the end of a message's header
STRAY = "stray"  # the end of a call outside a call


class Markers:
    """The kinds of markers, and a pattern that finds the first marker in a text."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.kinds = {marker: kind for marker, kind in kinds.items() if marker}
        longest_first = sorted(self.kinds, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class AnswerMarkers:
    """The markers of a model's answers.

    Args:
        form: how the model answers.
        schemas: the schemas of the tools that may be called, by name.

    Attributes:
        in_state: the markers that count outside calls, by the state of the parser.
        call_start: a pattern for the beginning of another call in the text of a call.
        between_calls: a pattern for the text between two calls; group 1 is the end of the first.
        call_tail: the text that ends every call, if calls consist of tags.
    """

    def __init__(self, form: AnswerFormat, schemas: Schemas) -> None:
        self._form = form
        self._schemas = schemas
        single_tokens = "|".join(map(re.escape, form.tokens.values()))
        self._single_tokens = re.compile(single_tokens or r"(?!)")
        self.in_state = {state: self._find(state) for state in (NORMAL, REASONING, HEADER)}
        self.call_start = re.compile(re.escape(self.with_marks(form.family.start)) or "(?!)")
        end = re.escape(self.with_marks(form.family.end))
        calls = form.family.calls
        call_beginning = calls.beginning if isinstance(calls, TaggedCalls) else "(?!)"
        self.call_tail = calls.tail if isinstance(calls, TaggedCalls) else ""
        self.between_calls = re.compile(
            rf"((?:{end})?)\s*(?={self.call_start.pattern}{call_beginning})"
        )

    def with_marks(self, text: str) -> str:
        """Add `MARK` before the markers in a text that are single tokens."""
        return self._single_tokens.sub(rf"{MARK}\g<0>", text)

    def with_all_marks(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """Add marks to the markers that `kinds` maps to what each begins."""
        return {self.with_marks(marker): kind for marker, kind in kinds.items()}

    def _find(self, state: str) -> Markers:
        """Return the markers that count in a state, each with the state it leads to."""
        family = self._form.family
        header = self._form.header
        opens, closes = self._form.thought
        if header is not None:
            kinds = dict.fromkeys(header.ends, HEADER)
        else:
            kinds = {opens: REASONING, closes: NORMAL}
        if self._schemas:
            kinds[family.start] = TOOL
        if self._schemas and state == NORMAL:
            kinds[family.end] = STRAY
            for opening in family.openings:  # begins a call whose start marker is missing
                for name in self._schemas:
                    kinds[opening.replace("{name}", name)] = BARE
        kinds |= dict.fromkeys(family.dropped, state)  # these do not change the state
        kinds = self.with_all_marks(kinds)
        if header is not None and state == HEADER:
            # The end of a header counts as a single token and as several.
            kinds |= {header.message: MESSAGE, MARK + header.message: MESSAGE}
        return Markers(kinds)
