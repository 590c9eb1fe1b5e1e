"""Fields that the requests of several APIs share: sampling, content, functions, thinking."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, Field, Json
from pydantic_core import from_json

from ..settings import SEED_BITS, SETTINGS
from .body import Body, ListOf
from .generation_request import Tool
from .http_errors import RequestError

MAX_STOPS = 16
MAX_BIASES = 16384
MAX_TOP_LOGPROBS = 20
SEEDS: Final = 2**SEED_BITS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ModelName = Annotated[str, Field(max_length=512)]
MaxTokens = Annotated[int, Field(ge=-1)]  # -1, as llama.cpp and LM Studio have it, is the default
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Schema = dict[str, Any] | Json[dict[str, Any]]
Stops = Annotated[ListOf[str], Field(max_length=MAX_STOPS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def sampling_field(name: str, minimum: float | None = None, maximum: float | None = None) -> Any:
    """Make the request field of a sampling setting.

    Args:
        name: the setting.
        minimum, maximum: the bounds, where they differ from the setting's.
    """
    setting = SETTINGS[name]
    bounds: dict[str, Any] = {}
    if minimum is None:  # a setting that is off by default may also be 0
        minimum = setting.minimum if setting.default else 0
    if minimum is not None and 0 < minimum < 1e-9:
        bounds["gt"] = 0  # so that the error says "above 0"
    else:
        bounds["ge"] = minimum
    if setting.kind is int:
        bounds["lt"] = 2**31
    else:
        bounds["le"] = setting.maximum if maximum is None else maximum
    aliases = AliasChoices(name, *setting.aliases) if setting.aliases else None
    return Field(None, validation_alias=aliases, **bounds)


def sampling_settings(body: Body, stop: Sequence[str] | None, **more: Any) -> dict[str, Any]:
    """Return the engine's settings that a request names.

    Args:
        body: the request.
        stop: its stop strings.
        more: more settings, left out if they are None.
    """
    names = [name for name in SETTINGS if name in SamplingOptions.model_fields]
    values = {name: getattr(body, name, None) for name in names} | more
    values["stop"] = [text for text in stop or () if text] or None
    settings = {name: value for name, value in values.items() if value is not None}
    if "top_k" in settings:
        settings["top_k"] = max(0, settings["top_k"])
    if "seed" in settings:  # a negative one, as in llama.cpp, is random
        settings["seed"] = None if settings["seed"] < 0 else settings["seed"] % SEEDS
    return settings


class SamplingOptions(Body):
    """How tokens are chosen, in the APIs of OpenAI and Ollama."""

    unsupported = {"mirostat": 0, "typical_p": 1}

    temperature: float | None = sampling_field("temperature", maximum=2)
    top_p: float | None = sampling_field("top_p")
    top_k: int | None = sampling_field("top_k", minimum=-1)
    min_p: float | None = sampling_field("min_p")
    seed: int | None = None
    stop: str | Stops | None = None
    presence_penalty: float | None = sampling_field("presence_penalty", minimum=-2, maximum=2)
    frequency_penalty: float | None = sampling_field("frequency_penalty", minimum=-2, maximum=2)
    repetition_penalty: float | None = sampling_field("repetition_penalty", maximum=10)
    # How many of the last tokens the repetition penalty looks at; -1 is all.
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=MAX_BIASES)] | None = None
    draft: bool | None = None

    def settings(self, max_tokens: int | None) -> dict[str, Any]:
        """Return the engine's settings that the request names.

        A negative `max_tokens` means the default.
        """
        settings = sampling_settings(
            self,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            max_tokens=None if (max_tokens or 0) < 0 else max_tokens,
            block_size=1 if self.draft is False else None,
        )
        if self.repeat_last_n == 0:
            settings["repetition_penalty"] = SETTINGS["repetition_penalty"].default
        elif self.repeat_last_n is not None:
            # -1 becomes the largest size, which includes all tokens.
            settings["repetition_context_size"] = self.repeat_last_n % 2**31
        return settings


class ThinkingConfig(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"] = "disabled"

    @property
    def ignored(self) -> list[str]:
        """Names of what is ignored, because chat templates have no switch for it."""
        return [f"thinking {self.type}"] if self.type == "between_tools" else []

    def template_settings(self) -> dict[str, Any]:
        """Return variables of the chat template."""
        return {} if self.ignored else thinking_settings(self.type != "disabled")


class ReasoningOptions(Body):
    """How much the model reasons."""

    unsupported = {"max_tokens": None, "mode": "standard"}

    effort: Effort | None = None
    enabled: bool | None = None

    def template_settings(self) -> dict[str, Any]:
        """Return variables of the chat template."""
        return thinking_settings(self.enabled) | thinking_settings(self.effort)


def thinking_settings(effort: str | bool | None) -> dict[str, Any]:
    """Return the chat template's variables for thinking.

    Args:
        effort: how much to think, such as "low"; "none" or False turns thinking off, True turns it
            on, and None leaves it to the template.
    """
    if effort is None:
        return {}
    if isinstance(effort, bool) or effort == "none":
        return {"enable_thinking": effort is True}
    return {"reasoning_effort": effort, "enable_thinking": True}


class ResponseFormat(Body):
    """The format of the answer. In chat completions the schema is in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "json_schema"
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    json_schema: ResponseFormat | None = None

    def answer_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, or None for free text. Raises `RequestError`."""
        if self.type == "text":
            return None
        default = {"type": "object"} if self.type == "json_object" else {}
        if self.json_schema is None and self.schema_ is None and not default:
            raise RequestError("The format json_schema needs a schema.")
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return schema or default


class Function(Body):
    """A function of a tool or of an earlier call (with arguments), or only its name."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    arguments: Any = None  # an object in Ollama's API; null if the call has none

    def tool(self, namespace: str | None = None) -> Tool:
        """Convert to the internal tool. Raises `RequestError` if it has no name."""
        if not self.name:
            raise RequestError("A function has no name.", param="tools")
        parameters = self.parameters or {"type": "object", "properties": {}}
        return Tool(
            flat_name(namespace, self.name),
            description=self.description or "",
            parameters=parameters,
            strict=bool(self.strict),
        )


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def template_call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Convert an earlier call for a chat template, which expects an object as arguments."""
    value = arguments
    if isinstance(arguments, str):
        with suppress(ValueError):
            value = from_json(arguments or "{}")
    if value is None or value == []:  # PHP writes an empty object as a list
        value = {}
    if not isinstance(value, dict):  # the model did not write an object
        value = {"arguments": arguments}
    return {"id": id or "", "type": "function", "function": {"name": name, "arguments": value}}


class ToolSelection(Body):
    """One tool, or several with a mode. Chat completions wrap each in one more object."""

    type: str
    name: str = ""
    function: Function | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: ListOf[ToolSelection] | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def tool_name(self) -> str:
        """The name of the tool, if this selects a single one."""
        return self.function.name if self.function else self.name


class AllowedTools(Body):
    """Some of the tools."""

    mode: Literal["auto", "required"] = "auto"
    tools: ListOf[ToolSelection]


# Mistral calls "required" "any".
ToolChoiceField = Literal["none", "auto", "required", "any"] | ToolSelection


def read_tool_choice(choice: ToolChoiceField | None, parallel: bool | None) -> dict[str, Any]:
    """Return the arguments of `GenerationRequest` for a choice among tools.

    A tool that is selected by name is called once.

    Raises `RequestError` for a tool without a name.
    """
    may_repeat = parallel is not False
    if not isinstance(choice, ToolSelection):
        mode = "required" if choice == "any" else choice or "auto"
        return {"tool_choice": mode, "allowed_tools": None, "parallel_calls": may_repeat}
    selection = choice.allowed_tools or choice
    if selection.tools is not None:
        names = frozenset(tool.tool_name for tool in selection.tools)
        return {
            "tool_choice": selection.mode,
            "allowed_tools": names,
            "parallel_calls": may_repeat,
        }
    if not choice.tool_name:
        raise RequestError("The tool has no name.", param="tool_choice")
    return {
        "tool_choice": "required",
        "allowed_tools": frozenset({choice.tool_name}),
        "parallel_calls": False,
    }
