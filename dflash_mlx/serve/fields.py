"""Fields that the requests of several APIs share: sampling, content, functions, thinking."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, Field, Json
from pydantic_core import from_json

from ..settings import SEED_BITS, SETTINGS
from .body import Body, ListOf
from .errors import RequestError
from .request import Tool

MAX_STOPS, MAX_BIASES, MAX_TOP_LOGPROBS = 16, 16384, 20
SEEDS: Final = 2**SEED_BITS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ModelName = Annotated[str, Field(max_length=512)]
MaxTokens = Annotated[int, Field(ge=-1)]  # -1, as llama.cpp and LM Studio have it, is the default
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Schema = dict[str, Any] | Json[dict[str, Any]]
Stops = Annotated[ListOf[str], Field(max_length=MAX_STOPS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def sampled(name: str, least: float | None = None, most: float | None = None) -> Any:
    """A request field for a sampling setting; `least` and `most` replace its own bounds."""
    setting = SETTINGS[name]
    if least is None:
        least = setting.least if setting.default else 0
    is_open = 0 < least < 1e-9  # "above 0" says the same
    is_whole = setting.kind is int
    return Field(
        None,
        gt=0 if is_open else None,
        ge=None if is_open else least,
        le=None if is_whole else setting.most if most is None else most,
        lt=2**31 if is_whole else None,
        validation_alias=AliasChoices(name, *setting.aliases) if setting.aliases else None,
    )


def sampling_settings(body: Body, stop: Sequence[str] | None, **more: Any) -> dict[str, Any]:
    """The engine's settings that a request names, with `more` of them that are not None."""
    names = [name for name in SETTINGS if name in SamplingOptions.model_fields]
    values = {name: getattr(body, name, None) for name in names} | more
    values["stop"] = [text for text in stop or () if text] or None
    found = {name: value for name, value in values.items() if value is not None}
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    if "seed" in found:  # a negative one, as in llama.cpp, is random
        found["seed"] = None if found["seed"] < 0 else found["seed"] % SEEDS
    return found


class SamplingOptions(Body):
    """How tokens are chosen, in the APIs of OpenAI and Ollama."""

    unsupported = {"mirostat": 0, "typical_p": 1}

    temperature: float | None = sampled("temperature", most=2)
    top_p: float | None = sampled("top_p")
    top_k: int | None = sampled("top_k", least=-1)
    min_p: float | None = sampled("min_p")
    seed: int | None = None
    stop: str | Stops | None = None
    presence_penalty: float | None = sampled("presence_penalty", least=-2, most=2)
    frequency_penalty: float | None = sampled("frequency_penalty", least=-2, most=2)
    repetition_penalty: float | None = sampled("repetition_penalty", most=10)
    # Of the repetition penalty; -1 is all.
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES)] | None = None
    draft: bool | None = None

    def settings(self, max_tokens: int | None) -> dict[str, Any]:
        """The engine's settings that the request names. Negative `max_tokens` are the default."""
        found = sampling_settings(
            self,
            [self.stop] if isinstance(self.stop, str) else self.stop,
            max_tokens=None if (max_tokens or 0) < 0 else max_tokens,
            block_size=1 if self.draft is False else None,
        )
        if self.repeat_last_n == 0:
            found["repetition_penalty"] = SETTINGS["repetition_penalty"].default
        elif self.repeat_last_n is not None:
            found["repetition_context_size"] = self.repeat_last_n % 2**31
        return found


class ThinkingConfig(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"] = "disabled"

    @property
    def ignored(self) -> list[str]:
        """What templates have no switch for: they choose themselves."""
        return [f"thinking {self.type}"] if self.type == "between_tools" else []

    def template_settings(self) -> dict[str, Any]:
        """The variables of the chat template."""
        return {} if self.ignored else thinking_settings(self.type != "disabled")


class ReasoningOptions(Body):
    """How much the model reasons."""

    unsupported = {"max_tokens": None, "mode": "standard"}

    effort: Effort | None = None
    enabled: bool | None = None

    def template_settings(self) -> dict[str, Any]:
        """The variables of the chat template."""
        return thinking_settings(self.enabled) | thinking_settings(self.effort)


def thinking_settings(effort: str | bool | None) -> dict[str, Any]:
    """The chat template's variables for a reasoning effort, or for thinking at all."""
    if effort is None:
        return {}
    if isinstance(effort, bool) or effort == "none":
        return {"enable_thinking": effort is True}
    return {"reasoning_effort": effort, "enable_thinking": True}


class ResponseFormat(Body):
    """The format of the answer. Chat completions have the schema in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "json_schema"
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    json_schema: ResponseFormat | None = None

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text. Raises `RequestError`."""
        if self.type == "text":
            return None
        default = {"type": "object"} if self.type == "json_object" else {}
        if self.json_schema is None and self.schema_ is None and not default:
            raise RequestError("The format json_schema needs a schema.")
        return (self.json_schema or self).schema_ or default


class Function(Body):
    """A function: of a tool, of an earlier call (with arguments), or by its name alone."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    arguments: Any = None  # an object in Ollama's API, and null where there are none

    def tool(self, namespace: str | None = None) -> Tool:
        """The internal tool. Raises `RequestError` if it has no name."""
        if not self.name:
            raise RequestError("A function has no name.", param="tools")
        parameters = self.parameters or {"type": "object", "properties": {}}
        name = flat_name(namespace, self.name)
        return Tool(name, self.description or "", parameters, bool(self.strict))


def flat_name(namespace: str | None, name: str) -> str:
    """The name that the model reads for a function of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def template_call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """An earlier call as chat templates take it: arguments are an object."""
    value = arguments
    if isinstance(arguments, str):
        with suppress(ValueError):
            value = from_json(arguments or "{}")
    if value is None or value == []:  # PHP writes an empty object as a list
        value = {}
    if not isinstance(value, dict):  # the model wrote what is no object
        value = {"arguments": arguments}
    return {"id": id or "", "type": "function", "function": {"name": name, "arguments": value}}


class ToolSelection(Body):
    """One tool, or some tools with a mode; chat completions have one more object around each."""

    type: str
    name: str = ""
    function: Function | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: ListOf[ToolSelection] | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def own_name(self) -> str:
        """The name of the one tool."""
        return self.function.name if self.function else self.name


class AllowedTools(Body):
    """Some of the tools."""

    mode: Literal["auto", "required"] = "auto"
    tools: ListOf[ToolSelection]


# "any", as Mistral calls "required"
ToolChoiceField = Literal["none", "auto", "required", "any"] | ToolSelection


def read_tool_choice(choice: ToolChoiceField | None, parallel: bool | None) -> dict[str, Any]:
    """The choice among tools, as `GenerationRequest` takes it. A named tool is called once.

    Raises `RequestError` for a tool without a name.
    """
    mode: Any = "required" if choice == "any" else choice or "auto"
    names, parallel = None, parallel is not False
    if isinstance(choice, ToolSelection):
        some = choice.allowed_tools or choice
        if some.tools is None:
            if not choice.own_name:
                raise RequestError("The tool has no name.", param="tool_choice")
            mode, names, parallel = "required", frozenset({choice.own_name}), False
        else:
            mode, names = some.mode, frozenset(tool.own_name for tool in some.tools)
    return {"tool_choice": mode, "allowed_tools": names, "parallel_calls": parallel}
