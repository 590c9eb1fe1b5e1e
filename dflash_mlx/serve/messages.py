"""The dialect of Anthropic's messages: what is asked. messages_answers.py has what is answered."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from .ask import Ask, Tool, given
from .chat import effort_settings
from .errors import Refusal
from .fields import Body, Ignored, Only, Refused, Several

# Claude Code's first block of the system prompt. It differs from session to session, and a prompt
# that differs at its start shares nothing with another one.
BILLING: Final = "x-anthropic-billing-header:"


class Block(Body):
    """A piece of a turn: text, a call, its result, what the model thought."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Several[Block] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None
    citations: Ignored = None
    signature: Ignored = None

    def said(self) -> str:
        """Its text. Raises `Refusal` for an image, a document and all others without one."""
        if self.type != "text":
            raise Refusal(f"Content of type {self.type!r} is not supported: text is.")
        return self.text or ""


class Turn(Body):
    """One turn; of a result and what the user says to it come two."""

    role: Literal["user", "assistant", "system"]
    content: str | Several[Block]

    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates expect it."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [_result(one) for one in self.content if one.type == "tool_result"]
        told = {"tool_result", "tool_use", "thinking", "redacted_thinking"}
        text = "\n".join(one.said() for one in self.content if one.type not in told)
        message: dict[str, Any] = {"role": self.role, "content": text}
        calls = [_call(one) for one in self.content if one.type == "tool_use"]
        thought = "\n".join(one.thinking or "" for one in self.content if one.type == "thinking")
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return [*results, *([message] if text or calls or thought or not results else [])]


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": block.id or "", "type": "function", "function": function}


def _result(block: Block) -> dict[str, Any]:
    content = block.content
    text = "\n".join(one.said() for one in content) if isinstance(content, list) else content or ""
    if block.is_error:
        text = f"Error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": block.tool_use_id or ""}


class ToolGiven(Body):
    """A tool of the client's; Anthropic's own, which run on its servers, are refused."""

    type: Annotated[str | None, Only("custom")] = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = None

    def tool(self) -> Tool:
        """The internal form."""
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


class ToolChoice(Body):
    """Whether a tool has to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Ignored = None
    display: Ignored = None


class Format(Body):
    """What an answer has to look like."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How hard to try, and what the answer has to look like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    model: Annotated[str, Field(max_length=512)] = "default"
    messages: Annotated[Several[Turn], Field(min_length=1)]
    system: str | Several[Block] | None = None
    tools: Several[ToolGiven] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored = None
    context_management: Ignored = None
    mcp_servers: Annotated[Any, Only([])] = None

    def ask(self, **settings: Any) -> Ask:
        """The internal request. Raises `Refusal`."""
        choice, output = self.tool_choice, self.output_config
        kinds: dict[str, Literal["none", "auto", "required"]]
        kinds = {"any": "required", "tool": "required", "none": "none"}
        allowed = None
        if choice is not None and choice.type == "tool":
            if choice.name is None:
                raise Refusal("name is missing.", param="tool_choice.name")
            allowed = frozenset({choice.name})
        messages = [
            *self._system(),
            *(one for turn in self.messages for one in turn.for_template()),
        ]
        last = messages[-1]
        return Ask(
            self.model,
            messages,
            settings,
            [one.tool() for one in self.tools or ()],
            kinds.get(choice.type, "auto") if choice else "auto",
            allowed,
            not (choice and choice.disable_parallel_tool_use),
            output.format.schema_ if output and output.format else None,
            template=self._template(),
            continues=last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last,
        )

    def _system(self) -> list[dict[str, Any]]:
        """The system prompt without what differs from one session to the next."""
        blocks = [self.system] if isinstance(self.system, str) else self.system or []
        texts = [one if isinstance(one, str) else one.said() for one in blocks]
        text = "\n\n".join(one for one in texts if one and not one.startswith(BILLING))
        return [{"role": "system", "content": text}] if text else []

    def _template(self) -> dict[str, Any]:
        effort = self.output_config.effort if self.output_config else None
        settings = effort_settings(effort)
        if self.thinking is None or self.thinking.type == "disabled":
            settings["enable_thinking"] = False
        else:
            settings["enable_thinking"] = True
        return settings


class MessagesBody(CountBody):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: Annotated[Several[str], Field(max_length=16)] | None = None
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    container: Refused = None

    def ask(self, **settings: Any) -> Ask:
        """The internal request. Raises `Refusal`."""
        named = given(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=[one for one in self.stop_sequences or () if one] or None,
        )
        return super().ask(**named | settings)
