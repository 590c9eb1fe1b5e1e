"""Grammars that make an answer fit a schema, or make it a tool call.

They are written in llguidance's dialect of Lark, from the family's description of its answers. If
the model may reason or write text first, the grammar starts after the marker. JSON has the
whitespace of `structured.SPACES`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..answers.calls import JsonCalls, TaggedCalls
from ..answers.families import AnswerFormat
from ..answers.values import allowed_types, listed_values
from ..errors import SettingsError
from ..structured import SPACES, Grammar, GrammarTokens
from .errors import RequestError
from .request import GenerationRequest, Tool

if TYPE_CHECKING:
    from ..targets import Target

_ANYTHING: Final = "/(?s:.*)/"
MAX_NEWLINES: Final = 2  # after a thought; more would never end
_NEWLINES: Final = f"/\\n{{0,{MAX_NEWLINES}}}/"
MAX_PROPERTIES: Final = 1000  # of an object; the time to compile grows with their square
FLEXIBLE: Final[dict[str, Any]] = {}  # any white space, as a client may have begun the answer
MAX_CALLS: Final = 16  # forced at once; small models would never stop


class GrammarFactory:
    """Makes the logits processors of requests.

    Args:
        target: the model whose answers they constrain.
        form: how it answers.
    """

    def __init__(self, target: Target, form: AnswerFormat) -> None:
        self._target, self._form = target, form
        self._added: dict[str, int] = target.tokenizer.get_added_vocab()
        self._lock = threading.Lock()
        self._tokens: GrammarTokens | None = None  # takes seconds for a large vocabulary

    def make(
        self, request: GenerationRequest, starts_in_reasoning: bool, begun: str = ""
    ) -> list[Grammar | None]:
        """A grammar for each answer; None for free text. Raises `RequestError`.

        Args:
            request: says what the answers are.
            starts_in_reasoning: whether the prompt ends in a thought.
            begun: the beginning of an answer that the prompt ends with.
        """
        _check_size([request.schema, *(tool.parameters for tool in request.callable_tools)])
        try:
            return self._make(request, starts_in_reasoning, begun, SPACES)
        except SettingsError:
            if not begun:
                raise
            return self._make(request, starts_in_reasoning, begun, FLEXIBLE)

    def _make(
        self,
        request: GenerationRequest,
        starts_in_reasoning: bool,
        begun: str,
        layout: Mapping[str, Any],
    ) -> list[Grammar | None]:
        """See `make`; `layout` is that of JSON for llguidance."""
        rules, what = self._rules(request, layout)
        if not rules:
            return [None] * request.n
        with self._lock:
            self._tokens = self._tokens or GrammarTokens(self._target)
        if request.schema is not None and self._form.thought[0]:
            # A thought would hide that no answer fits.
            self._tokens.matcher(self._tokens.of_lark(f"start: answer\n{rules}"), what)
        start = self._start(request, starts_in_reasoning, bool(begun))
        grammar = self._tokens.of_lark(f"{start}\n{rules}")
        given = self._tokens.of_text(self._behind_thoughts(begun), self._added)
        return [Grammar(self._tokens, grammar, what, given) for _ in range(request.n)]

    def _behind_thoughts(self, begun: str) -> str:
        """An answer's beginning from its last thought on, if that goes on, or behind it."""
        closes = self._form.thought[1]
        text = begun.rpartition(closes)[2] if closes else begun
        newlines = len(text) - len(text.lstrip("\n"))
        return text[max(0, newlines - MAX_NEWLINES) :]

    def _rules(self, request: GenerationRequest, layout: Mapping[str, Any]) -> tuple[str, str]:
        """The rules of the answer, and what they are of; empty for free text."""
        tools = request.callable_tools
        header, family = self._form.header, self._form.family
        if request.tool_choice == "required":
            return self._calls(tools, request.parallel_calls), "The tools' schemas"
        if request.schema is not None:
            opening = header.answer if header and not request.is_raw else ""
            start = self._literal(opening)
            rules = f"answer: {start} json\njson: {json_rule(request.schema, layout)}"
            if tools and self.may_call_beside_schema:
                calls = self._calls(tools, request.parallel_calls).replace("answer:", "calls:", 1)
                rules = f"{rules.replace(' json', ' json | calls', 1)}\n{calls}"
            return rules, "The schema of the response format"
        if any(tool.strict for tool in tools) and self._has_rules and not header:
            rest = f"answer: (free body {self._literal(family.end)})* rest\nrest: {_ANYTHING}"
            rules = f"{rest}\n{self._until('free', family.start)}\n{self._body(tools)}"
            return rules, "The tools' schemas"
        return "", ""

    def _start(self, request: GenerationRequest, starts_in_reasoning: bool, is_begun: bool) -> str:
        """The rule `start`: a thought may stand before the answer, where it has a field."""
        opens, closes = self._form.thought
        before = _NEWLINES if is_begun else ""  # a template's, or behind a thought
        if not opens or request.is_raw:
            return f"start: {before} answer"
        thought = f"thought {_NEWLINES}"
        first = thought if starts_in_reasoning else f"({self._literal(opens)} {thought})?"
        return f"start: {before} {first} answer\n{self._until('thought', closes)}"

    @property
    def may_call_beside_schema(self) -> bool:
        """Whether a model may call tools in place of an answer that fits a schema.

        Not if its calls are JSON as well: llguidance would take every "{" for a call's.
        """
        family = self._form.family
        has_marker = bool(family.start) and "{" not in family.openings
        return self._has_rules and has_marker and not self._form.header

    @property
    def _has_rules(self) -> bool:
        return isinstance(self._form.family.calls, JsonCalls | TaggedCalls)

    def _calls(self, tools: Sequence[Tool], parallel: bool) -> str:
        """The rule `answer`: one call or several."""
        family, header = self._form.family, self._form.header
        if not self._has_rules:
            raise RequestError(
                f"This model's call syntax ({family.name}) cannot be forced: use tool_choice auto.",
                param="tool_choice",
            )
        more = f"(/\\n?/ call){{0,{MAX_CALLS - 1}}}" if parallel and family.end else ""
        # A call is the whole answer of a family that begins calls with their JSON.
        start = "" if "{" in family.openings else family.start
        call = f"call: {self._literal(start)} body {self._literal(family.end)}"
        to = ""
        if header is not None and family.start:
            to = f'" to=" /[^<]+/ {self._literal(header.message)}'
        return f"answer: {to} call {more}\n{call}\n{self._body(tools)}"

    def _body(self, tools: Sequence[Tool]) -> str:
        """The rule `body`: the text of one call of any tool."""
        names = " | ".join(f"tool_{number}" for number in range(len(tools)))
        rules = [self._tool(number, tool) for number, tool in enumerate(tools)]
        return "\n".join([f"body: {names}", *rules])

    def _tool(self, number: int, tool: Tool) -> str:
        """The rule of one call. Raises `RequestError` for parameters that are not an object."""
        syntax = self._form.family.calls
        assert isinstance(syntax, JsonCalls | TaggedCalls)
        head = self._literal(syntax.head.replace("{name}", tool.name))
        tail = self._literal(syntax.tail)
        schema = dict(tool.parameters)
        if schema.setdefault("type", "object") != "object":
            raise RequestError(f"The parameters of {tool.name} are not an object.", param="tools")
        if isinstance(syntax, JsonCalls):
            rule = f"tool_{number}: {head} args_{number} {tail}"
            return f"{rule}\nargs_{number}: {json_rule(schema)}"
        defined = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        blocks, rules = [], []
        for place, (name, value, required) in enumerate(_parameters(tool)):
            rule = f"value_{number}_{place}"
            kinds = allowed_types(value, schema)
            is_text = "true" if "string" in kinds else "false"
            key = syntax.key.replace("{key}", name).replace("{text}", is_text)
            blocks.append(f"({self._literal(key)} {rule}){'' if required else '?'}")
            rules.append(self._value(rule, dict(value) | defined, kinds, syntax.value_end))
        return "\n".join([*rules, f"tool_{number}: {head} {' '.join(blocks)} {tail}"])

    def _value(self, rule: str, schema: Mapping[str, Any], kinds: frozenset[str], end: str) -> str:
        """The rule of a parameter's value: strings as they are, all others as JSON."""
        if options := listed_values(schema):
            texts = [one if isinstance(one, str) else json.dumps(one) for one in options]
            return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {self._literal(end)}"
        if "string" in kinds:
            return self._until(rule, end)
        return f"{rule}: {rule}_json {self._literal(end)}\n{rule}_json: {json_rule(schema)}"

    def _literal(self, text: str) -> str:
        """A text in a rule.

        A token that was added to the vocabulary, such as <tool_call>, is not text to llguidance: a
        rule has to name it by its id.
        """
        parts = re.split(f"({self._own})", text) if self._own else [text]
        return " ".join(
            f"<[{self._added[part]}]>" if part in self._added else json.dumps(part)
            for part in parts
            if part
        )

    @property
    def _own(self) -> str:
        return "|".join(map(re.escape, self._form.tokens.values()))

    def _until(self, name: str, marker: str) -> str:
        """The rule `name`: anything up to and including a marker."""
        found = re.search(self._own, marker) if self._own else None
        if found is None:
            return f"{name}[suffix={json.dumps(marker)}]: {_ANYTHING}"
        rest = self._literal(marker[found.start() :])
        return f"{name}: {name}_text {rest}\n{name}_text: {_ANYTHING}"


def json_rule(schema: Mapping[str, Any], layout: Mapping[str, Any] = SPACES) -> str:
    """The right side of a rule for a JSON schema. What no grammar can hold of it is left out."""
    return f"%json {json.dumps({'x-guidance': {**layout, 'lenient': True}, **schema})}"


def _check_size(schemas: list[Any]) -> None:
    """Raise `RequestError` for schemas that would take too long to compile."""
    if _count_properties(schemas) > 5 * MAX_PROPERTIES:
        raise RequestError(f"All schemas have more than {5 * MAX_PROPERTIES:,} properties.")


def _count_properties(schema: Any) -> int:
    """The properties of all objects of a schema. Raises `RequestError` for too many of one."""
    own, parts = 0, list(schema) if isinstance(schema, list) else []
    if isinstance(schema, Mapping):
        parts, properties = list(schema.values()), schema.get("properties")
        own = len(properties) if isinstance(properties, Mapping) else 0
    if own > MAX_PROPERTIES:
        raise RequestError(f"An object of a schema has more than {MAX_PROPERTIES:,} properties.")
    return own + sum(map(_count_properties, parts))


def _parameters(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """The name, the schema and whether it is required, of each parameter."""
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        message = f"The parameters of {tool.name} are not a JSON schema."
        raise RequestError(message, param="tools")
    return [
        (name, schema if isinstance(schema, Mapping) else {}, name in required)
        for name, schema in properties.items()
    ]
