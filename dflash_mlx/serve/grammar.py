"""Grammars that make an answer fit a schema, or make it a tool call.

They are written in llguidance's dialect of Lark, for each call syntax with simple rules. If the
model may reason or write text first, the grammar starts after the marker. JSON has the whitespace
of `structured.SPACES`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..structured import SPACES, Grammar, GrammarTokens
from .errors import RequestError
from .request import GenerationRequest, Tool
from .tools import ToolSyntax

if TYPE_CHECKING:
    from ..targets import Target

_ANYTHING: Final = "/(?s:.*)/"
MAX_CALLS: Final = 16  # forced at once; small models would never stop


class GrammarFactory:
    """Makes the logits processors of requests.

    Args:
        target: the model whose answers they constrain.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._literals = _Literals(target.tokenizer)
        self._lock = threading.Lock()
        self._tokens: GrammarTokens | None = None  # takes seconds for a large vocabulary

    def make(
        self, syntax: ToolSyntax, request: GenerationRequest, starts_in_reasoning: bool
    ) -> list[Grammar | None]:
        """A grammar for each answer; None for free text. Raises `RequestError`."""
        tools = request.callable_tools
        if request.tool_choice == "required":
            rules, what = self._calls(syntax, tools, request.parallel_calls), "The tools' schemas"
        elif request.schema is not None:
            rules = f"answer: {json_rule(request.schema)}"
            what = "The schema of the response format"
        elif any(tool.strict for tool in tools) and syntax.name in _CALL_RULES:
            return self._compile(
                self._free_until_call(syntax, tools), "The tools' schemas", request
            )
        else:
            return [None] * request.n
        start = "start: answer"
        if starts_in_reasoning:
            until = self._literals.until("thinking", str(self._target.tokenizer.think_end))
            start = f"start: thinking newlines answer\n{until}\nnewlines: /\\n*/"
        return self._compile(f"{start}\n{rules}", what, request)

    def _compile(self, lark: str, what: str, request: GenerationRequest) -> list[Grammar | None]:
        with self._lock:
            self._tokens = self._tokens or GrammarTokens(self._target)
        grammar = self._tokens.of_lark(lark)
        return [Grammar(self._tokens, grammar, what) for _ in range(request.n)]

    def _calls(self, syntax: ToolSyntax, tools: Sequence[Tool], parallel: bool) -> str:
        """The rule `answer`: one call or several."""
        if syntax.name not in _CALL_RULES:
            raise RequestError(
                f"This model's call syntax ({syntax.name}) cannot be forced: use tool_choice auto.",
                param="tool_choice",
            )
        more = f"(/\\n?/ call){{0,{MAX_CALLS - 1}}}" if parallel and syntax.end else ""
        start, end = self._literals.literal(syntax.start), self._literals.literal(syntax.end)
        return f"answer: call {more}\ncall: {start} body {end}\n{self._body(syntax, tools)}"

    def _free_until_call(self, syntax: ToolSyntax, tools: Sequence[Tool]) -> str:
        """Free text whose calls fit the schemas of their tools."""
        return (
            f"start: (free body {self._literals.literal(syntax.end)})* rest\nrest: {_ANYTHING}\n"
            f"{self._literals.until('free', syntax.start)}\n{self._body(syntax, tools)}"
        )

    def _body(self, syntax: ToolSyntax, tools: Sequence[Tool]) -> str:
        """The rule `body`: the text of one call of any tool."""
        rule = _CALL_RULES[syntax.name]
        names = " | ".join(f"tool_{number}" for number in range(len(tools)))
        rules = [rule(number, tool, self._literals) for number, tool in enumerate(tools)]
        return "\n".join([f"body: {names}", *rules])


class _Literals:
    """Literal texts of rules.

    A token that was added to the vocabulary, such as <tool_call>, is not text to llguidance: a rule
    has to name it by its id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._added: dict[str, int] = tokenizer.get_added_vocab()

    def literal(self, text: str) -> str:
        """A text in a rule."""
        return f"<[{self._added[text]}]>" if text in self._added else json.dumps(text)

    def until(self, name: str, marker: str) -> str:
        """The rule `name`: anything up to and including a marker."""
        if marker not in self._added:
            return f"{name}[suffix={json.dumps(marker)}]: {_ANYTHING}"
        return f"{name}: {name}_text {self.literal(marker)}\n{name}_text: {_ANYTHING}"


def json_rule(schema: Mapping[str, Any]) -> str:
    """The right side of a rule for a JSON schema. What no grammar can hold of it is left out."""
    return f"%json {json.dumps({'x-guidance': SPACES | {'lenient': True}, **schema})}"


def _json_call(number: int, tool: Tool, literals: _Literals) -> str:
    """{"name": ..., "arguments": ...} on a line of its own."""
    head = literals.literal(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'tool_{number}: {head} args_{number} "}}\\n"\n{_arguments(number, tool)}'


def _mistral_call(number: int, tool: Tool, literals: _Literals) -> str:
    """name[ARGS]{...}"""
    name, marker = literals.literal(tool.name), literals.literal("[ARGS]")
    return f"tool_{number}: {name} {marker} args_{number}\n{_arguments(number, tool)}"


def _kimi_call(number: int, tool: Tool, literals: _Literals) -> str:
    """A call of a section; its id is the function's name and number."""
    markers = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    begin, arguments, end = map(literals.literal, markers)
    name = literals.literal(f"functions.{tool.name}:0")
    rule = f"tool_{number}: {begin} {name} {arguments} args_{number} {end}"
    return f"{rule}\n{_arguments(number, tool)}"


def _qwen_call(number: int, tool: Tool, literals: _Literals) -> str:
    """<function=name>, and a block for each parameter."""
    blocks, rules = [], []
    for place, (name, schema, required) in enumerate(_parameters(tool)):
        rule = f"value_{number}_{place}"
        head = literals.literal(f"<parameter={name}>\n")
        blocks.append(f"({head} {rule}){'' if required else '?'}")
        rules.append(_value(rule, schema, "\n</parameter>\n", literals))
    start = literals.literal(f"\n<function={tool.name}>\n")
    end = literals.literal("</function>\n")
    return "\n".join([*rules, f"tool_{number}: {start} {' '.join(blocks)} {end}"])


def _glm_call(number: int, tool: Tool, literals: _Literals) -> str:
    """The name, then keys and values."""
    blocks, rules = [], []
    for place, (name, schema, required) in enumerate(_parameters(tool)):
        rule = f"value_{number}_{place}"
        texts = ("<arg_key>", name, "</arg_key>", "\n", "<arg_value>")
        key = " ".join(map(literals.literal, texts))
        blocks.append(f"({key} {rule} /\\n?/){'' if required else '?'}")
        rules.append(_value(rule, schema, "</arg_value>", literals))
    start = literals.literal(tool.name)
    return "\n".join([*rules, f"tool_{number}: {start} /\\n?/ {' '.join(blocks)}"])


def _arguments(number: int, tool: Tool) -> str:
    """The rule of a tool's arguments. Raises `RequestError` if they are not an object."""
    schema = dict(tool.parameters)
    if schema.setdefault("type", "object") != "object":
        raise RequestError(f"The parameters of {tool.name} are not an object.", param="tools")
    return f"args_{number}: {json_rule(schema)}"


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


def _value(rule: str, schema: Mapping[str, Any], end: str, literals: _Literals) -> str:
    """The rule of a parameter's value: strings as they are, all others as JSON."""
    if schema.get("type") == "string" and "enum" not in schema:
        return literals.until(rule, end)
    options = schema.get("enum")
    if isinstance(options, list) and options and all(isinstance(one, str) for one in options):
        return f"{rule}: ({' | '.join(map(json.dumps, options))}) {literals.literal(end)}"
    return f"{rule}: {rule}_json {literals.literal(end)}\n{rule}_json: {json_rule(schema)}"


_CALL_RULES: Final[Mapping[str, Callable[[int, Tool, _Literals], str]]] = {
    "json_tools": _json_call,
    "mistral": _mistral_call,
    "kimi_k2": _kimi_call,
    "qwen3_coder": _qwen_call,
    "glm47": _glm_call,
    "laguna": _glm_call,
}
