"""Grammars that make an answer fit a schema, or make it a tool call.

They are written in llguidance's dialect of Lark, and follow the syntax of the model's family. If
the model may reason or write text first, the grammar starts after the marker. JSON has the layout
of `structured.SPACES`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..answers.calls import JsonCalls
from ..answers.families import AnswerFormat
from ..answers.tagged_calls import TaggedCalls
from ..answers.values import allowed_types, listed_values
from ..errors import SettingsError
from ..structured import SPACES, Grammar, GrammarTokens
from .generation_request import GenerationRequest, Tool
from .http_errors import RequestError

if TYPE_CHECKING:
    from ..targets import Target

_ANYTHING: Final = "/(?s:.*)/"
MAX_NEWLINES: Final = 2  # after a thought, because small models might never stop
_NEWLINES: Final = f"/\\n{{0,{MAX_NEWLINES}}}/"
MAX_PROPERTIES: Final = 1000  # of an object; the time to compile grows with the square
FLEXIBLE: Final[dict[str, Any]] = {}  # a layout that allows any white space
MAX_CALLS: Final = 16  # in one forced answer, because small models might never stop


class GrammarFactory:
    """Makes the grammars of requests.

    Args:
        target: the model whose answers they constrain.
        form: how the model answers.
    """

    def __init__(self, target: Target, form: AnswerFormat) -> None:
        self._target = target
        self._form = form
        self._added_tokens: dict[str, int] = target.tokenizer.get_added_vocab()
        self._lock = threading.Lock()
        # Made on first use, because that takes seconds for a large vocabulary.
        self._tokens: GrammarTokens | None = None

    def make(
        self, request: GenerationRequest, starts_in_reasoning: bool, begun: str = ""
    ) -> list[Grammar | None]:
        """Make a grammar for each answer, or None for free text. Raises `RequestError`.

        Args:
            request: the request.
            starts_in_reasoning: whether the prompt ends in a thought.
            begun: the beginning of the answer that the prompt ends with.
        """
        _check_size([request.schema, *(tool.parameters for tool in request.callable_tools)])
        try:
            return self._make(
                request,
                starts_in_reasoning=starts_in_reasoning,
                begun=begun,
                layout=SPACES,
            )
        except SettingsError:
            if not begun:
                raise
            # The client may have begun the answer with another layout.
            return self._make(
                request,
                starts_in_reasoning=starts_in_reasoning,
                begun=begun,
                layout=FLEXIBLE,
            )

    def _make(
        self,
        request: GenerationRequest,
        starts_in_reasoning: bool,
        begun: str,
        layout: Mapping[str, Any],
    ) -> list[Grammar | None]:
        """Make a grammar for each answer. `layout` is llguidance's option for JSON."""
        rules, name = self._rules(request, layout)
        if not rules:
            return [None] * request.n
        with self._lock:
            self._tokens = self._tokens or GrammarTokens(self._target)
        if request.schema is not None and self._form.thinks:
            # Check the rules without a thought, which would hide that no answer fits.
            self._tokens.matcher(self._tokens.of_lark(f"start: answer\n{rules}"), name)
        start = self._start(request, starts_in_reasoning, bool(begun))
        grammar = self._tokens.of_lark(f"{start}\n{rules}")
        begun_ids = self._tokens.of_text(self._after_thoughts(begun), self._added_tokens)
        return [
            Grammar(self._tokens, grammar, name=name, begun=begun_ids) for _ in range(request.n)
        ]

    def _after_thoughts(self, begun: str) -> str:
        """Return the beginning of an answer without complete thoughts."""
        _, closes = self._form.thought
        text = begun.rpartition(closes)[2] if closes else begun
        newlines = len(text) - len(text.lstrip("\n"))
        # The grammar allows only the last newlines before the answer.
        return text[max(0, newlines - MAX_NEWLINES) :]

    def _rules(self, request: GenerationRequest, layout: Mapping[str, Any]) -> tuple[str, str]:
        """Return the rules of the answer, and their name in errors; both are empty for free text.

        Raises `RequestError`.
        """
        tools = request.callable_tools
        header = self._form.header
        family = self._form.family
        if request.tool_choice == "required":
            return self._calls(tools, request.parallel_calls), "The tools' schemas"
        if request.schema is not None:
            opening = self._literal(header.answer) if header and not request.is_raw else ""
            json_schema = f"json: {json_rule(request.schema, layout)}"
            name = "The schema of the response format"
            if tools and self.allows_calls_with_schema:
                calls = self._calls(tools, request.parallel_calls).replace("answer:", "calls:", 1)
                return f"answer: {opening} json | calls\n{json_schema}\n{calls}", name
            return f"answer: {opening} json\n{json_schema}", name
        if any(tool.strict for tool in tools) and self._has_rules and not header:
            answer = f"answer: (free body {self._literal(family.end)})* rest\nrest: {_ANYTHING}"
            rules = f"{answer}\n{self._until('free', family.start)}\n{self._body(tools)}"
            return rules, "The tools' schemas"
        return "", ""

    def _start(self, request: GenerationRequest, starts_in_reasoning: bool, is_begun: bool) -> str:
        """Return the rule `start`. It allows a thought before the answer, unless it is raw."""
        opens, closes = self._form.thought
        # Newlines of the template, or after a thought in the prompt.
        newlines = _NEWLINES if is_begun else ""
        if not opens or request.is_raw:
            return f"start: {newlines} answer"
        thought = f"thought {_NEWLINES}"
        if not starts_in_reasoning:
            thought = f"({self._literal(opens)} {thought})?"
        return f"start: {newlines} {thought} answer\n{self._until('thought', closes)}"

    @property
    def allows_calls_with_schema(self) -> bool:
        """Whether a model may call tools instead of an answer that fits a schema.

        It may not if its calls are JSON as well: llguidance would take every "{" for a call.
        """
        family = self._form.family
        has_marker = bool(family.start) and "{" not in family.openings
        return self._has_rules and has_marker and not self._form.header

    @property
    def _has_rules(self) -> bool:
        """Whether the syntax of the family's calls can be written as rules."""
        return isinstance(self._form.family.calls, JsonCalls | TaggedCalls)

    def _calls(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Return the rule `answer` for one call or several. Raises `RequestError`."""
        family = self._form.family
        header = self._form.header
        if not self._has_rules:
            raise RequestError(
                f"This model's call syntax ({family.name}) cannot be forced: use tool_choice auto.",
                param="tool_choice",
            )
        more_calls = f"(/\\n?/ call){{0,{MAX_CALLS - 1}}}" if parallel and family.end else ""
        # If a family may begin calls with their JSON, a forced call needs no marker.
        start = "" if "{" in family.openings else family.start
        call = f"call: {self._literal(start)} body {self._literal(family.end)}"
        recipient = ""
        if header is not None and family.start:
            recipient = f'" to=" /[^<]+/ {self._literal(header.message)}'
        return f"answer: {recipient} call {more_calls}\n{call}\n{self._body(tools)}"

    def _body(self, tools: Sequence[Tool]) -> str:
        """Return the rule `body` for the text of one call of any tool."""
        names = " | ".join(f"tool_{number}" for number in range(len(tools)))
        rules = [self._tool(number, tool) for number, tool in enumerate(tools)]
        return "\n".join([f"body: {names}", *rules])

    def _tool(self, number: int, tool: Tool) -> str:
        """Return the rule of one call. Raises `RequestError` for non-object parameters."""
        syntax = self._form.family.calls
        assert isinstance(syntax, JsonCalls | TaggedCalls)
        head = self._literal(syntax.head.replace("{name}", tool.name))
        tail = self._literal(syntax.tail)
        schema = dict(tool.parameters)
        if schema.setdefault("type", "object") != "object":
            raise RequestError(f"The parameters of {tool.name} are not an object.", param="tools")
        if isinstance(syntax, JsonCalls):
            call = f"tool_{number}: {head} args_{number} {tail}"
            return f"{call}\nargs_{number}: {json_rule(schema)}"
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        arguments = []
        rules = []
        for index, (name, value_schema, is_required) in enumerate(_parameters(tool)):
            rule = f"value_{number}_{index}"
            types = allowed_types(value_schema, schema)
            is_text = "true" if "string" in types else "false"
            key = syntax.key.replace("{key}", name).replace("{text}", is_text)
            arguments.append(f"({self._literal(key)} {rule}){'' if is_required else '?'}")
            rules.append(
                self._value(
                    rule,
                    schema=dict(value_schema) | definitions,
                    types=types,
                    end=syntax.value_end,
                )
            )
        return "\n".join([*rules, f"tool_{number}: {head} {' '.join(arguments)} {tail}"])

    def _value(self, rule: str, schema: Mapping[str, Any], types: frozenset[str], end: str) -> str:
        """Return the rule of a parameter's value: bare text for strings, JSON for all others."""
        options = listed_values(schema)
        if options:
            texts = [
                option if isinstance(option, str) else json.dumps(option) for option in options
            ]
            return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {self._literal(end)}"
        if "string" in types:
            return self._until(rule, end)
        return f"{rule}: {rule}_json {self._literal(end)}\n{rule}_json: {json_rule(schema)}"

    def _literal(self, text: str) -> str:
        """Write a text in a rule.

        To llguidance, tokens that were added to the vocabulary, such as <tool_call>, are not text.
        A rule has to name them by their ids.
        """
        pattern = self._single_tokens
        parts = re.split(f"({pattern})", text) if pattern else [text]
        literals = []
        for part in parts:
            if part in self._added_tokens:
                literals.append(f"<[{self._added_tokens[part]}]>")
            elif part:
                literals.append(json.dumps(part))
        return " ".join(literals)

    @property
    def _single_tokens(self) -> str:
        """A pattern of the markers that are single tokens."""
        return "|".join(map(re.escape, self._form.tokens.values()))

    def _until(self, name: str, marker: str) -> str:
        """Return a rule for anything up to and including a marker."""
        match = re.search(self._single_tokens, marker) if self._single_tokens else None
        if match is None:
            return f"{name}[suffix={json.dumps(marker)}]: {_ANYTHING}"
        end = self._literal(marker[match.start() :])
        return f"{name}: {name}_text {end}\n{name}_text: {_ANYTHING}"


def json_rule(schema: Mapping[str, Any], layout: Mapping[str, Any] = SPACES) -> str:
    """Return the right side of a rule for a JSON schema.

    Parts of the schema that llguidance does not support are ignored.
    """
    return f"%json {json.dumps({'x-guidance': {**layout, 'lenient': True}, **schema})}"


def _check_size(schemas: list[Any]) -> None:
    """Raise `RequestError` for schemas that would take too long to compile."""
    if _count_properties(schemas) > 5 * MAX_PROPERTIES:
        raise RequestError(f"All schemas have more than {5 * MAX_PROPERTIES:,} properties.")


def _count_properties(schema: Any) -> int:
    """Count the properties of all objects in a schema.

    Raises `RequestError` if one object has too many.
    """
    if isinstance(schema, list):
        return sum(map(_count_properties, schema))
    if not isinstance(schema, Mapping):
        return 0
    properties = schema.get("properties")
    count = len(properties) if isinstance(properties, Mapping) else 0
    if count > MAX_PROPERTIES:
        raise RequestError(f"An object of a schema has more than {MAX_PROPERTIES:,} properties.")
    return count + sum(map(_count_properties, schema.values()))


def _parameters(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return the name of each parameter, its schema, and whether it is required."""
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        message = f"The parameters of {tool.name} are not a JSON schema."
        raise RequestError(message, param="tools")
    return [
        (name, schema if isinstance(schema, Mapping) else {}, name in required)
        for name, schema in properties.items()
    ]
