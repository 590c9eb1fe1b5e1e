"""Grammars for what a request demands: an answer that fits a schema, a call of a tool.

They are written in llguidance's dialect of Lark, for each syntax of calls whose rules are simple
enough to be written down. Where the model may think or write first, the grammar lets it, and takes
hold after the marker. JSON is laid out as everywhere in this package (`structured.laid_out`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..structured import Grammar, GrammarTokens, laid_out
from .ask import Ask, Tool
from .errors import Refusal
from .tools import Syntax

if TYPE_CHECKING:
    from ..targets import Target

_ANYTHING: Final = "/(?s:.*)/"
MOST_CALLS: Final = 16  # that are forced at once; small models would go on for ever


class Grammars:
    """Makes the logits processors of requests.

    Args:
        target: whose answers they shape.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._words = _Words(target.tokenizer)
        self._lock = threading.Lock()
        self._tokens: GrammarTokens | None = None  # seconds for large vocabularies, once

    def of(self, syntax: Syntax, ask: Ask, thinking: bool) -> list[Grammar | None]:
        """One for each answer, or none where the request leaves it free. Raises `Refusal`."""
        tools = ask.callable
        strict = [tool for tool in tools if tool.strict]
        if ask.choice == "required":
            rules, what = self._calls(syntax, tools, ask.parallel), "The tools' schemas"
        elif ask.schema is not None:
            rules, what = f"answer: {as_rule(ask.schema)}", "The schema of the response format"
        elif strict and syntax.name in _BODIES:
            return self._made(self._free_until_call(syntax, tools), "The tools' schemas", ask.n)
        else:
            return [None] * ask.n
        start = "start: answer"
        if thinking:
            start = (
                f"start: thinking breaks answer\n{self._words.until('thinking', self._think_end)}"
            )
            start += "\nbreaks: /\\n*/"
        return self._made(f"{start}\n{rules}", what, ask.n)

    @property
    def _think_end(self) -> str:
        return str(self._target.tokenizer.think_end)

    def _made(self, lark: str, what: str, count: int) -> list[Grammar | None]:
        with self._lock:
            self._tokens = self._tokens or GrammarTokens(self._target)
        grammar = self._tokens.of_lark(lark)
        return [Grammar(self._tokens, grammar, what) for _ in range(count)]

    def _calls(self, syntax: Syntax, tools: Sequence[Tool], parallel: bool) -> str:
        """The rule `answer`: one call or several."""
        if syntax.name not in _BODIES:
            raise Refusal(
                f"Calls in the syntax of this model ({syntax.name}) cannot be forced: "
                "leave tool_choice to the model.",
                param="tool_choice",
            )
        further = f"(/\\n?/ call){{0,{MOST_CALLS - 1}}}" if parallel and syntax.end else ""
        start, end = self._words.literal(syntax.start), self._words.literal(syntax.end)
        return f"answer: call {further}\ncall: {start} body {end}\n{self._body(syntax, tools)}"

    def _free_until_call(self, syntax: Syntax, tools: Sequence[Tool]) -> str:
        """Free text, and every call in it as its tool's schema has it."""
        return (
            f"start: (free body {self._words.literal(syntax.end)})* rest\nrest: {_ANYTHING}\n"
            f"{self._words.until('free', syntax.start)}\n{self._body(syntax, tools)}"
        )

    def _body(self, syntax: Syntax, tools: Sequence[Tool]) -> str:
        return _BODIES[syntax.name](tools, self._words)


class _Words:
    """Texts in rules, in the tokens of a vocabulary.

    A token that was added to it, such as <tool_call>, is no text to llguidance, whether the
    tokenizer calls it special or not: a rule has to name it by its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._added: dict[str, int] = tokenizer.get_added_vocab()

    def literal(self, text: str) -> str:
        """A text in a rule."""
        return f"<[{self._added[text]}]>" if text in self._added else quoted(text)

    def until(self, name: str, marker: str) -> str:
        """A rule for anything up to and with a marker."""
        if marker not in self._added:
            return f"{name}[suffix={quoted(marker)}]: {_ANYTHING}"
        return f"{name}: {name}_text {self.literal(marker)}\n{name}_text: {_ANYTHING}"


def quoted(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text)


def as_rule(schema: Mapping[str, Any]) -> str:
    """What a rule says that stands for a JSON schema."""
    return f"%json {json.dumps(laid_out(schema))}"


def _json_body(tools: Sequence[Tool], words: _Words) -> str:
    """{"name": ..., "arguments": ...} on a line of its own."""
    rules = []
    for number, tool in enumerate(tools):
        head = words.literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules.append(
            f'tool_{number}: {head} args_{number} "}}\\n"\nargs_{number}: {_arguments(tool)}'
        )
    return _alternatives(tools, rules)


def _mistral_body(tools: Sequence[Tool], words: _Words) -> str:
    """name[ARGS]{...}"""
    rules = [
        f"tool_{number}: {words.literal(tool.name)} {words.literal('[ARGS]')} args_{number}\n"
        f"args_{number}: {_arguments(tool)}"
        for number, tool in enumerate(tools)
    ]
    return _alternatives(tools, rules)


def _kimi_body(tools: Sequence[Tool], words: _Words) -> str:
    """One call of a section; its id is the function's name and number."""
    marks = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    begin, arguments, end = map(words.literal, marks)
    rules = []
    for number, tool in enumerate(tools):
        name = words.literal(f"functions.{tool.name}:0")
        rules.append(f"tool_{number}: {begin} {name} {arguments} args_{number} {end}")
        rules.append(f"args_{number}: {_arguments(tool)}")
    return _alternatives(tools, rules)


def _qwen_body(tools: Sequence[Tool], words: _Words) -> str:
    """<function=name>, and a block for each parameter."""
    rules = []
    for number, tool in enumerate(tools):
        head, parts = words.literal(f"\n<function={tool.name}>\n"), []
        for place, (name, schema, needed) in enumerate(_parameters(tool)):
            rule = f"value_{number}_{place}"
            block = f"({words.literal(f'<parameter={name}>{chr(10)}')} {rule})"
            parts.append(block if needed else f"{block}?")
            rules.append(_value(rule, schema, "\n</parameter>\n", words))
        end = words.literal("</function>\n")
        rules.append(f"tool_{number}: {head} {' '.join(parts)} {end}")
    return _alternatives(tools, rules)


def _glm_body(tools: Sequence[Tool], words: _Words) -> str:
    """The name, then keys and values."""
    rules = []
    for number, tool in enumerate(tools):
        parts = []
        for place, (name, schema, needed) in enumerate(_parameters(tool)):
            rule = f"value_{number}_{place}"
            key = " ".join(
                words.literal(part)
                for part in ("<arg_key>", name, "</arg_key>", "\n", "<arg_value>")
            )
            parts.append(f"({key} {rule} /\\n?/){'' if needed else '?'}")
            rules.append(_value(rule, schema, "</arg_value>", words))
        rules.append(f"tool_{number}: {words.literal(tool.name)} /\\n?/ {' '.join(parts)}")
    return _alternatives(tools, rules)


def _alternatives(tools: Sequence[Tool], rules: Sequence[str]) -> str:
    names = " | ".join(f"tool_{number}" for number in range(len(tools)))
    return "\n".join([f"body: {names}", *rules])


def _arguments(tool: Tool) -> str:
    """The rule of a tool's arguments. Raises `Refusal` for a schema of no object."""
    schema = dict(tool.parameters)
    if schema.setdefault("type", "object") != "object":
        raise Refusal(f"The parameters of {tool.name} are not an object.", param="tools")
    return as_rule(schema)


def _parameters(tool: Tool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and need of each parameter, in their order."""
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise Refusal(f"The parameters of {tool.name} are no JSON schema.", param="tools")
    return [
        (name, schema if isinstance(schema, Mapping) else {}, name in required)
        for name, schema in properties.items()
    ]


def _value(rule: str, schema: Mapping[str, Any], end: str, words: _Words) -> str:
    """A parameter's value as text: strings as they are, all others as JSON."""
    if schema.get("type") == "string" and "enum" not in schema:
        return words.until(rule, end)
    options = schema.get("enum")
    if isinstance(options, list) and options and all(isinstance(one, str) for one in options):
        return f"{rule}: ({' | '.join(map(quoted, options))}) {words.literal(end)}"
    return f"{rule}: {rule}_json {words.literal(end)}\n{rule}_json: {as_rule(schema)}"


_BODIES: Final[Mapping[str, Callable[[Sequence[Tool], _Words], str]]] = {
    "json_tools": _json_body,
    "mistral": _mistral_body,
    "kimi_k2": _kimi_body,
    "qwen3_coder": _qwen_body,
    "glm47": _glm_body,
    "laguna": _glm_body,
}
