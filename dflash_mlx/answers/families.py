"""A table of how each family answers: its thoughts, its calls, and the ids in its template.

The parser of answers, the grammar of forced calls and the prompts of the next turn use it. The
source is each family's chat template. mlx-lm's parser reads families that are not in the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .calls import CallSyntax, JsonCalls, LibraryCalls, LiteralCalls
from .tagged_calls import TaggedCalls

# Pairs of markers around thoughts. The first pair in a model's vocabulary counts.
_THOUGHTS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
_TOKEN: Final = re.compile(r"[<\[｜|].+")  # an added token that may be a marker
_MARKER: Final = re.compile(r"(<\|?[^<>]*[^\s<>]>|\[/?\w+\])")  # a marker in a text


@dataclass(frozen=True)
class MessageHeader:
    """The syntax of answers of several messages, each with a header that says what it is.

    Attributes:
        ends: markers that end a message; the next header follows.
        thinks: a regular expression for the headers of thoughts.
        calls: a regular expression for the headers of calls, with the name.
        thought, answer: the text before a thought, and before the text of the answer.
        next: the text between two messages.
        message: the marker that ends a header.
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
        calls: the syntax of the text between `start` and `end`.
        start, end: the markers around calls; an empty end is the end of the answer.
        openings: how a call begins if the model leaves out `start`; {name} is a tool's name.
        bare_end: the marker that ends such a call.
        template_words: texts in the chat template by which the family is recognized, if mlx-lm does
            not recognize it.
        header: the syntax of headers, for answers of several messages.
        call_ids: the form of ids that the template accepts; empty if it accepts any.
        dropped: markers to remove, because they mean nothing.
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
        """All markers that may be single tokens of a vocabulary."""
        markers = [self.start, self.end, *self.openings, self.bare_end, *self.dropped]
        for syntax in (self.calls, self.header):
            if syntax is not None:
                markers += [text for text in vars(syntax).values() if isinstance(text, str)]
        if self.header is not None:
            markers += self.header.ends
        return markers


def _invoke_tags(prefix: str = "", attributes: str = "") -> TaggedCalls:
    """Make the syntax of <invoke name="..."> and <parameter name="...">, with a prefix."""
    return TaggedCalls(
        head=f'<{prefix}invoke name="{{name}}">\n',
        key=f'<{prefix}parameter name="{{key}}"{attributes}>',
        value_end=f"</{prefix}parameter>\n",
        tail=f"</{prefix}invoke>\n",
    )


def _deepseek(name: str, head: str, tail: str, *template_words: str) -> Family:
    """Make a family of DeepSeek with calls between tokens. V3 puts JSON into a block of code."""
    begin = "<｜tool▁call▁begin｜>"
    end = "<｜tool▁call▁end｜>"
    pattern = (
        r"(?:<｜tool▁call▁begin｜>|(?=[^\n<{]*<｜tool▁sep｜>))\s*(?:function\s*<｜tool▁sep｜>)?"
        r"(?P<name>[^\n<{]+)"
        r"(?:<｜tool▁sep｜>)?\s*(?:```json)?"
    )
    return Family(
        name,
        JsonCalls(head=begin + head, tail=tail + end, name=pattern),
        start="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        openings=(begin,),
        bare_end=end,
        template_words=(begin, *template_words),
    )


def _dsml(name: str, section: str) -> Family:
    """Make a family of DeepSeek with tags that contain the token ｜DSML｜."""
    token = "｜DSML｜"
    return Family(
        name,
        _invoke_tags(token, ' string="{text}"'),
        start=f"<{token}{section}>",
        end=f"</{token}{section}>",
        openings=(f'<{token}invoke name="{{name}}">',),
        bare_end=f"</{token}invoke>",
        template_words=(token, f"{section}>"),
    )


HARMONY: Final = Family(
    "harmony",
    JsonCalls(
        head="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        tail="<|call|>",
    ),
    header=MessageHeader(
        ends=("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
        thinks=re.compile(r"<\|channel\|>\s*analysis"),
        calls=re.compile(r"to=(?P<space>functions\.)?(?P<name>[^\s<]+)"),
        thought="<|channel|>analysis<|message|>",
        answer="<|channel|>final<|message|>",
        next="<|end|><|start|>assistant",
    ),
)
HERMES: Final = Family(
    "json_tools",
    JsonCalls(),
    start="<tool_call>",
    end="</tool_call>",
    openings=('{"name": "{name}"',),
    bare_end="</tool_call>",
)
GLM: Final = Family(
    "glm47",
    TaggedCalls(
        head="{name}\n",
        key="<arg_key>{key}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    ),
    start="<tool_call>",
    end="</tool_call>",
    openings=("{name}\n<arg_key>", "{name}<arg_key>"),
    bare_end="</tool_call>",
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
        JsonCalls(head='[{"name": "{name}", "arguments": ', tail="}]"),
        start="<TOOLCALL>",
        end="</TOOLCALL>",
        openings=('[{"name": "{name}"',),
        bare_end="</TOOLCALL>",
        template_words=("<TOOLCALL>",),
    ),
    Family(
        "llama3",
        JsonCalls(head='{"name": "{name}", "parameters": ', tail="}"),
        start="<|python_tag|>",
        openings=("{",),
        template_words=('"parameters": dictionary of argument name',),
    ),
    Family(
        "qwen3_coder",
        TaggedCalls(
            head="\n<function={name}>\n",
            key="<parameter={key}>\n",
            value_end="\n</parameter>\n",
            tail="</function>\n",
        ),
        start="<tool_call>",
        end="</tool_call>",
        openings=("<function={name}>",),
        bare_end="</function>",
    ),
    GLM,
    Family(
        "minimax_m2",
        _invoke_tags(),
        start="<minimax:tool_call>",
        end="</minimax:tool_call>",
        openings=('<invoke name="{name}">',),
        bare_end="</invoke>",
    ),
    Family(
        "muse_spark",
        _invoke_tags("atem:"),
        start="<atem:function_calls>",
        end="</atem:function_calls>",
        openings=('<atem:invoke name="{name}">',),
        bare_end="</atem:invoke>",
        header=MessageHeader(
            ends=("<|eom|>", "<|eot|>", "<|start|>"),
            thinks=re.compile(r"to=self\b"),
            calls=None,
            thought=" to=self<|message|>",
            answer=" to=user<|message|>",
            next="<|eom|><|start|>assistant",
        ),
    ),
    Family(
        "kimi_k2",
        JsonCalls(
            head="<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
            tail="<|tool_call_end|>",
            name=(
                r"(?:<\|tool_call_begin\|>|(?=[^<]*<\|tool_call_argument_begin))\s*"
                r"(?:functions\.)?(?P<name>[^\s<{]+?)(?::\d+)?\s*"
                r"(?:<\|tool_call_argument_begin\|>|(?=\{))"
            ),
        ),
        start="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        openings=("<|tool_call_begin|>",),
        bare_end="<|tool_call_end|>",
        call_ids="functions.{name}:{number}",
    ),
    Family(
        "mistral",
        JsonCalls(
            head="{name}[ARGS]",
            tail="",
            name=(
                r"(?:\[TOOL_CALLS\]\s*)?(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?"
                r"(?:\[ARGS\]|(?=\{))"
            ),
        ),
        start="[TOOL_CALLS]",
        openings=("{name}[ARGS]",),
        call_ids="call{number:05}",
    ),
    Family(
        "gemma4",
        LiteralCalls(
            name=r"call:(?P<name>[^{]+?)\s*\{",
            separator=":",
            close="}",
            quote='<|"|>',
        ),
        start="<|tool_call>",
        end="<tool_call|>",
        openings=("call:{name}{",),
        bare_end="}",
    ),
    Family(
        "pythonic",
        LiteralCalls(name=r"(?P<name>[^\s(\[\],]+)\(", separator="=", close=")"),
        start="<|tool_call_start|>",
        end="<|tool_call_end|>",
        openings=("[{name}(",),
        bare_end="]",
    ),
)


@dataclass(frozen=True)
class AnswerFormat:
    """How one model answers: its family, and the markers in its vocabulary.

    Attributes:
        family: the model's family.
        thought: the markers that begin and end a thought; empty for a model that does not think.
        tokens: token id -> text, for markers that are single tokens.
        template_has_tools: whether the chat template renders calls.
        shows_tools: whether the chat template renders the list of tools.
        header: the family's header, if the vocabulary has its markers.
    """

    family: Family
    thought: tuple[str, str] = ("", "")
    tokens: Mapping[int, str] = field(default_factory=dict)
    template_has_tools: bool = True
    shows_tools: bool = True
    header: MessageHeader | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> AnswerFormat:
        """Find the format for a tokenizer of mlx-lm."""
        vocabulary = tokenizer.get_vocab()
        family = _family(tokenizer, vocabulary)
        header = family.header
        if header is not None and header.message not in vocabulary:
            header = None
        thought = ("", "")
        if header is not None:
            thought = (header.thought, header.next)
        else:
            for opens, closes in _THOUGHTS:
                if _markers_in(opens + closes) <= set(vocabulary):
                    thought = (opens, closes)
                    break
        # A token may be only a part of a marker, so the markers are searched as one text.
        markers = "\0".join([*family.markers, *thought])
        tokens = {
            id: text
            for text, id in tokenizer.get_added_vocab().items()
            if _TOKEN.fullmatch(text) and text in markers
        }
        template_has_tools = family is not HERMES or bool(tokenizer.has_tool_calling)
        template = tokenizer.chat_template
        mentions_tools = not isinstance(template, str) or "tools" in template
        return cls(
            family=family,
            thought=thought,
            tokens=tokens,
            template_has_tools=template_has_tools,
            shows_tools=template_has_tools and mentions_tools,
            header=header,
        )

    @property
    def thinks(self) -> bool:
        """Whether the model has markers for thoughts."""
        opens, _ = self.thought
        return bool(opens)

    def starts_in_thought(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of a thought, which the answer continues."""
        opens, _ = self.thought
        ending = str(tokenizer.decode(list(ids[-8:])))  # enough for a marker and newlines
        return self.header is None and bool(opens) and ending.rstrip().endswith(opens)


def _markers_in(text: str) -> set[str]:
    return set(_MARKER.findall(text))


def _family(tokenizer: Any, vocabulary: Mapping[str, int]) -> Family:
    """Find a tokenizer's family by its vocabulary, mlx-lm's parser or its chat template."""
    if _markers_in("<|start|><|channel|><|message|><|end|><|call|>") <= set(vocabulary):
        return HARMONY
    families = {family.name: family for family in FAMILIES} | {"laguna": GLM}
    if tokenizer.has_tool_calling:
        name = tokenizer.tool_parser.__module__.rpartition(".")[2]
        if name in families:
            return families[name]
        return Family(
            name,
            LibraryCalls(tokenizer.tool_parser),
            start=tokenizer.tool_call_start,
            end=tokenizer.tool_call_end,
            dropped=tuple(tokenizer.structural_markers),
        )
    template = tokenizer.chat_template
    if not isinstance(template, str):
        template = str(tokenizer.init_kwargs.get("chat_template_type"))
        return families.get(template, HERMES)
    for family in FAMILIES:
        words = family.template_words
        if words and all(word in template for word in words):
            return family
    return HERMES
