"""The dialect of OpenAI's chat completions: what is asked. chat_answers.py has what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .ask import Ask, Tool, given
from .body import parse_object
from .errors import Refusal
from .fields import Body, Ignored, Only, Refused, Several

Biases = dict[int, Annotated[float, Field(ge=-100, le=100)]]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
STOPS, MOST_CHOICES, MOST_TOP = 16, 8, 20
SEEDS, MOST_BIASES = 2**32, 16384


def _few(biases: Any) -> Any:
    """A check before any other: pydantic would tell of every wrong one."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"more than {MOST_BIASES:,} tokens")
    return biases


class Sampled(Body):
    """How tokens are chosen, which chat and completions say alike."""

    model: Annotated[str, Field(max_length=512)] = "default"
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | Annotated[Several[str], Field(max_length=STOPS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[Biases | None, BeforeValidator(_few)] = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    draft: bool | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None

    def settings(self, max_tokens: int | None) -> dict[str, Any]:
        """Those of the engine that are named."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return given(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % SEEDS,
            stop=[one for one in stop if one] if stop else None,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            block_size=1 if self.draft is False else None,
        )


class ContentPart(Body):
    """A piece of a message; of the kinds that there are only text."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def said(self) -> str:
        """Its text. Raises `Refusal` for an image, a sound or a file."""
        if self.type not in ("text", "refusal"):
            raise Refusal(f"Content of type {self.type!r} is not supported: text is.")
        return (self.text if self.type == "text" else self.refusal) or ""


class CalledFunction(Body):
    """Of a call in the history."""

    name: str
    arguments: str = "{}"


class CallMade(Body):
    """A call in the history."""

    id: str = ""
    type: Annotated[str, Only("function")] = "function"
    function: CalledFunction


class Message(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Several[CallMade] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    audio: Refused = None
    function_call: Refused = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is text, arguments are objects."""
        parts = self.content
        text = "".join(one.said() for one in parts) if isinstance(parts, list) else parts
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text or self.refusal or ""}
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                history_call(one.id, one.function.name, one.function.arguments)
                for one in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


def history_call(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in the history, as chat templates expect it."""
    try:
        read = parse_object(arguments.encode()) if arguments.strip() else {}
    except (Refusal, UnicodeEncodeError):
        read = {"arguments": arguments}  # what the model wrote then was no JSON either
    return {"id": id, "type": "function", "function": {"name": name, "arguments": read}}


class Function(Body):
    """What may be called."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """The internal form."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return Tool(self.name, self.description or "", parameters, bool(self.strict))


class ToolGiven(Body):
    """A tool; of the kinds that there are only functions."""

    type: Annotated[str, Only("function")] = "function"
    function: Function


class Named(Body):
    """Names a function."""

    name: str


class ToolNamed(Body):
    """A tool by its function's name."""

    type: Literal["function"]
    function: Named


class AllowedTools(Body):
    """Some of the tools, and whether one has to be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Several[ToolNamed]


class ToolsAllowed(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchemaGiven(Body):
    """A schema with a name."""

    name: str = "answer"
    description: Ignored = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Ignored = None


class ResponseFormat(Body):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaGiven | None = None

    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """Its schema; None leaves it free."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}
        if self.json_schema is None:
            raise Refusal("json_schema is missing.", param="response_format.json_schema")
        return self.json_schema.schema_ or {}


class StreamOptions(Body):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class ChatBody(Sampled):
    """POST /v1/chat/completions"""

    messages: Annotated[Several[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Several[ToolGiven] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolNamed | ToolsAllowed | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Refused = None
    function_call: Refused = None
    functions: Refused = None
    modalities: Annotated[Several[str] | None, Only(["text"])] = None
    verbosity: Annotated[str | None, Only("medium")] = None
    web_search_options: Refused = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None

    def ask(self) -> Ask:
        """The internal request. Raises `Refusal`."""
        most = self.max_completion_tokens
        choice, allowed = _chosen(self.tool_choice)
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs goes with logprobs only.", param="top_logprobs")
        return Ask(
            self.model,
            [message.for_template() for message in self.messages],
            self.settings(self.max_tokens if most is None else most),
            [one.function.tool() for one in self.tools or ()],
            choice,
            allowed,
            self.parallel_tool_calls is not False and not isinstance(self.tool_choice, ToolNamed),
            None if self.response_format is None else self.response_format.schema_of_answer(),
            self.n or 1,
            (self.top_logprobs or 0) if self.logprobs else None,
            effort_settings(self.reasoning_effort) | (self.chat_template_kwargs or {}),
        )


def _chosen(choice: Any) -> tuple[Any, frozenset[str] | None]:
    if isinstance(choice, ToolNamed):
        return "required", frozenset({choice.function.name})
    if isinstance(choice, ToolsAllowed):
        allowed = choice.allowed_tools
        return allowed.mode, frozenset(one.function.name for one in allowed.tools)
    return choice or "auto", None


def effort_settings(effort: str | None) -> dict[str, Any]:
    """What a chat template is told of how much to think."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": effort, "enable_thinking": True}
