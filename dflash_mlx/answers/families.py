"""Each family's answers in one table: thoughts, calls, and the ids that its template takes.

The parser of answers, the grammar of forced calls and the prompts of the next turn read it. Written
after the families' chat templates. A family that is not here has mlx-lm's parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .calls import CallSyntax, JsonCalls, LibraryCalls, LiteralCalls, TaggedCalls

# Thoughts stand between these, where the vocabulary has them.
_THOUGHTS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
_TOKEN: Final = re.compile(r"[<\[｜|].+")  # of markers, among the added tokens
_MARKER: Final = re.compile(r"(<\|?[^<>]*[^\s<>]>|\[/?\w+\])")


@dataclass(frozen=True)
class MessageHeader:
    """An answer of several messages, each with a header that says what it is.

    Attributes:
        ends: what ends a message; the next header follows.
        thinks: a regular expression for the headers of thoughts.
        calls: one for those of calls, with the name.
        thought, answer: the text before a thought, and before the text of the answer.
        next: the text between two messages.
        message: what ends a header.
    """

    ends: tuple[str, ...]
    thinks: re.Pattern[str]
    calls: re.Pattern[str] | None
    thought: str
    answer: str
    next: str
    message: str = "<|message|>"


@dataclass(frozen=True)
class Family:
    """How the models of a family answer.

    Attributes:
        name: mlx-lm's name of the family's parser, if it has one.
        calls: what stands between `start` and `end`.
        start, end: the markers around calls; an empty end is the end of the answer.
        openings: where a call begins if the model leaves out `start`; {name} is a tool's.
        bare_end: what ends such a call.
        template_words: words that a chat template of the family has, where mlx-lm does not tell it.
        header: for answers of several messages.
        call_ids: the form of ids that the template takes; empty if any will do.
        dropped: markers that say nothing.
    """

    name: str
    calls: CallSyntax
    start: str = ""
    end: str = ""
    openings: tuple[str, ...] = ()
    bare_end: str = ""
    template_words: tuple[str, ...] = ()
    header: MessageHeader | None = None
    call_ids: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def markers(self) -> list[str]:
        """All markers that a vocabulary may have as tokens."""
        parts = [self.start, self.end, *self.openings, self.bare_end, *self.dropped]
        for syntax in (self.calls, self.header):
            if syntax is not None:
                parts += [one for one in vars(syntax).values() if isinstance(one, str)]
        return [*parts, *(self.header.ends if self.header else ())]


def _tags(prefix: str = "", more: str = "") -> TaggedCalls:
    """<invoke name="..."> and <parameter name="..."> with a prefix."""
    key = f'<{prefix}parameter name="{{key}}"{more}>'
    head, tail = f'<{prefix}invoke name="{{name}}">\n', f"</{prefix}invoke>\n"
    return TaggedCalls(head, key, f"</{prefix}parameter>\n", tail)


def _deepseek(name: str, head: str, tail: str, *marks: str) -> Family:
    """Calls between tokens; V3 has the JSON in a block of code."""
    pattern = (
        r"(?:<｜tool▁call▁begin｜>|(?=[^\n<{]*<｜tool▁sep｜>))\s*(?:function\s*<｜tool▁sep｜>)?"
        r"(?P<name>[^\n<{]+)"
        r"(?:<｜tool▁sep｜>)?\s*(?:```json)?"
    )
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    syntax = JsonCalls(begin + head, tail + end, pattern)
    section = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return Family(name, syntax, *section, (begin,), end, (begin, *marks))


def _dsml(name: str, section: str) -> Family:
    """Tags with a token of DeepSeek's own."""
    d = "｜DSML｜"
    opening, end = f'<{d}invoke name="{{name}}">', f"</{d}invoke>"
    both = f"<{d}{section}>", f"</{d}{section}>"
    marks = d, f"{section}>"
    return Family(name, _tags(d, ' string="{text}"'), *both, (opening,), end, marks)


_TOOL_CALL: Final = "<tool_call>", "</tool_call>"
_PAIRS: Final = TaggedCalls("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n")
_QWEN: Final = TaggedCalls(
    "\n<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n", "</function>\n"
)
_KIMI: Final = JsonCalls(
    "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    r"(?:<\|tool_call_begin\|>|(?=[^<]*<\|tool_call_argument_begin))\s*(?:functions\.)?"
    r"(?P<name>[^\s<{]+?)(?::\d+)?\s*(?:<\|tool_call_argument_begin\|>|(?=\{))",
)
_MISTRAL: Final = JsonCalls(
    "{name}[ARGS]",
    "",
    r"(?:\[TOOL_CALLS\]\s*)?(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]|(?=\{))",
)
_GEMMA: Final = LiteralCalls(r"call:(?P<name>[^{]+?)\s*\{", ":", "}", '<|"|>')
_HARMONY: Final = MessageHeader(
    ("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
    re.compile(r"<\|channel\|>\s*analysis"),
    re.compile(r"to=(?P<space>functions\.)?(?P<name>[^\s<]+)"),
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    "<|end|><|start|>assistant",
)
_MUSE: Final = MessageHeader(
    ("<|eom|>", "<|eot|>", "<|start|>"),
    re.compile(r"to=self\b"),
    None,
    " to=self<|message|>",
    " to=user<|message|>",
    "<|eom|><|start|>assistant",
)
HARMONY: Final = Family(
    "harmony",
    JsonCalls("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>"),
    header=_HARMONY,
)
HERMES: Final = Family(
    "json_tools", JsonCalls(), *_TOOL_CALL, ('{"name": "{name}"',), "</tool_call>"
)
GLM: Final = Family(
    "glm47", _PAIRS, *_TOOL_CALL, ("{name}\n<arg_key>", "{name}<arg_key>"), "</tool_call>"
)
FAMILIES: Final = (
    HARMONY,
    HERMES,
    _dsml("deepseek_v4", "tool_calls"),
    _dsml("deepseek_v32", "function_calls"),
    _deepseek("deepseek_v3", "function<｜tool▁sep｜>{name}\n```json\n", "\n```", "```json"),
    _deepseek("deepseek_v31", "{name}<｜tool▁sep｜>", ""),
    Family(
        "nemotron",
        JsonCalls('[{"name": "{name}", "arguments": ', "}]"),
        *("<TOOLCALL>", "</TOOLCALL>", ('[{"name": "{name}"',), "</TOOLCALL>", ("<TOOLCALL>",)),
    ),
    Family(
        "llama3",
        JsonCalls('{"name": "{name}", "parameters": ', "}"),
        *("<|python_tag|>", "", ("{",), "", ('"parameters": dictionary of argument name',)),
    ),
    Family("qwen3_coder", _QWEN, *_TOOL_CALL, ("<function={name}>",), "</function>"),
    GLM,
    Family(
        "minimax_m2",
        _tags(),
        *("<minimax:tool_call>", "</minimax:tool_call>", ('<invoke name="{name}">',), "</invoke>"),
    ),
    Family(
        "muse_spark",
        _tags("atem:"),
        *("<atem:function_calls>", "</atem:function_calls>"),
        *(('<atem:invoke name="{name}">',), "</atem:invoke>"),
        header=_MUSE,
    ),
    Family(
        "kimi_k2",
        _KIMI,
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *(("<|tool_call_begin|>",), "<|tool_call_end|>"),
        call_ids="functions.{name}:{number}",
    ),
    Family("mistral", _MISTRAL, "[TOOL_CALLS]", "", ("{name}[ARGS]",), call_ids="call{number:05}"),
    Family("gemma4", _GEMMA, "<|tool_call>", "<tool_call|>", ("call:{name}{",), "}"),
    Family(
        "pythonic",
        LiteralCalls(r"(?P<name>[^\s(\[\],]+)\(", "=", ")"),
        *("<|tool_call_start|>", "<|tool_call_end|>", ("[{name}(",), "]"),
    ),
)


@dataclass(frozen=True)
class AnswerFormat:
    """How one model answers: its family, with the tokens of its vocabulary.

    Attributes:
        family: the model's.
        thought: what begins a thought, and what ends it; empty for a model that does not think.
        tokens: token id -> text of the markers that are tokens of their own.
        template_has_tools: whether the chat template takes calls.
        shows_tools: whether it takes tools.
        header: the family's, if the vocabulary has its markers.
    """

    family: Family
    thought: tuple[str, str] = ("", "")
    tokens: Mapping[int, str] = field(default_factory=dict)
    template_has_tools: bool = True
    shows_tools: bool = True
    header: MessageHeader | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> AnswerFormat:
        """The format of an mlx-lm tokenizer."""
        vocabulary = tokenizer.get_vocab()
        family = _family(tokenizer, vocabulary)
        header = family.header if family.header and family.header.message in vocabulary else None
        pairs = [pair for pair in _THOUGHTS if _words(pair[0] + pair[1]) <= set(vocabulary)]
        thought = pairs[0] if pairs else ("", "")
        if header is not None:
            thought = (header.thought, header.next)
        markers = "\0".join([*family.markers, *thought])
        tokens = {
            id: text
            for text, id in tokenizer.get_added_vocab().items()
            if _TOKEN.fullmatch(text) and text in markers
        }
        native = family is not HERMES or bool(tokenizer.has_tool_calling)
        template = tokenizer.chat_template
        shows_tools = native and ("tools" in template if isinstance(template, str) else True)
        return cls(family, thought, tokens, native, shows_tools, header)

    def starts_in_thought(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Whether a prompt ends where it has opened a thought, which the answer goes on with."""
        opens, end = self.thought[0], str(tokenizer.decode(list(ids[-8:])))
        return self.header is None and bool(opens) and end.rstrip().endswith(opens)


def _words(text: str) -> set[str]:
    return set(_MARKER.findall(text))


def _family(tokenizer: Any, vocabulary: Mapping[str, int]) -> Family:
    """The family of a tokenizer: by its vocabulary, mlx-lm's parser or its chat template."""
    if _words("<|start|><|channel|><|message|><|end|><|call|>") <= set(vocabulary):
        return HARMONY
    known = {one.name: one for one in FAMILIES} | {"laguna": GLM}
    if tokenizer.has_tool_calling:
        name = tokenizer.tool_parser.__module__.rpartition(".")[2]
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        syntax, dropped = LibraryCalls(tokenizer.tool_parser), tuple(tokenizer.structural_markers)
        return known.get(name, Family(name, syntax, start, end, dropped=dropped))
    template = tokenizer.chat_template
    if not isinstance(template, str):
        template = str(tokenizer.init_kwargs.get("chat_template_type"))
        return known.get(template, HERMES)
    found = (
        one
        for one in FAMILIES
        if one.template_words and all(mark in template for mark in one.template_words)
    )
    return next(found, HERMES)
