"""What requests to OpenAI's APIs share: sampling fields, message content, functions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, Field, Json
from pydantic_core import from_json

from .body import Body, ListOf
from .errors import RequestError
from .request import Tool, instead_of, without_none

MAX_STOPS, MAX_CHOICES, MAX_BIASES, MAX_TOP_LOGPROBS = 16, 8, 16384, 20
SEEDS: Final = 2**32

Penalty = Annotated[float, Field(ge=-2, le=2)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ModelName = Annotated[str, Field(max_length=512)]
MaxTokens = Annotated[int, Field(ge=-1)]  # -1, as llama.cpp and LM Studio have it, is the default
Schema = dict[str, Any] | Json[dict[str, Any]]
ChoiceName = Literal["none", "auto", "required", "any"]  # "any", as Mistral calls "required"
Nothing = Annotated[list[Any], Field(max_length=0)] | None


class ResponseFormat(Body):
    """The format of the answer. Chat completions have the schema in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "json_schema"
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    json_schema: ResponseFormat | None = None

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text."""
        if self.type == "text":
            return None
        default = {"type": "object"} if self.type == "json_object" else {}
        return (self.json_schema or self).schema_ or default


class StructuredOutputs(Body):
    """The format of the answer, as vLLM takes it."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    choice: None = None
    grammar: None = None
    regex: None = None
    structural_tag: None = None

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text."""
        return {"type": "object"} if self.json_object and self.json_ is None else self.json_


class ThinkingConfig(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled"] = "disabled"


class ReasoningOptions(Body):
    """How much the model reasons."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: None = None
    mode: Literal["standard"] | None = None

    def template_settings(self) -> dict[str, Any]:
        """The variables of the chat template."""
        enabled = {} if self.enabled is None else {"enable_thinking": self.enabled}
        return enabled | thinking_settings(self.effort)


class SamplingOptions(Body):
    """How tokens are chosen, in the APIs of OpenAI and Ollama."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | Annotated[ListOf[str], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[
        float | None,
        Field(gt=0, le=10, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")),
    ] = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 is all
    logit_bias: (
        Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    draft: bool | None = None
    mirostat: Literal[0] | None = None
    typical_p: Literal[1] | None = None

    def settings(self, max_tokens: int | None) -> dict[str, Any]:
        """The engine's settings that the request names. Negative `max_tokens` are the default."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        found = without_none(
            max_tokens=None if (max_tokens or 0) < 0 else max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(0, self.top_k),
            min_p=self.min_p,
            stop=[text for text in stop if text] or None,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            block_size=1 if self.draft is False else None,
        )
        if self.seed is not None:  # a negative one, as llama.cpp and Ollama have it, is random
            found["seed"] = None if self.seed < 0 else self.seed % SEEDS
        for name, off in (("repetition", 1), ("presence", 0), ("frequency", 0)):
            if self.repeat_last_n == 0:
                found.pop(f"{name}_penalty", None)
            elif self.repeat_last_n and found.get(f"{name}_penalty", off) != off:
                found[f"{name}_context_size"] = self.repeat_last_n % 2**31
        return found


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class SamplingBody(SamplingOptions):
    """The fields that chat completions and completions share."""

    model: ModelName = "default"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    json_schema: Annotated[
        Schema | None, Field(validation_alias=AliasChoices("json_schema", "guided_json"))
    ] = None
    structured_outputs: StructuredOutputs | None = None
    # Fields of vLLM and llama.cpp that would change the answer.
    allowed_token_ids: Nothing = None
    bad_words: Nothing = None
    chat_template: None = None
    documents: Nothing = None
    dry_multiplier: Literal[0] | None = None
    dynatemp_range: Literal[0] | None = None
    grammar: Literal[""] | None = None
    guided_choice: None = None
    guided_grammar: None = None
    guided_regex: None = None
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    prompt_logprobs: Literal[0] | None = None
    stop_token_ids: Nothing = None
    truncate_prompt_tokens: None = None
    use_beam_search: Literal[False] | None = None
    xtc_probability: Literal[0] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text. Raises `RequestError`."""
        form, structured = self.response_format, self.structured_outputs
        if form and form.type == "json_schema" and not (form.json_schema or form.schema_):
            raise RequestError("json_schema is missing.", param="response_format.json_schema")
        schemas = [
            form.answer_schema() if form else None,
            self.json_schema,
            structured.answer_schema() if structured else None,
        ]
        given = [schema for schema in schemas if schema is not None]
        if len(given) > 1:
            raise RequestError("The request has two schemas of its answer.")
        return given[0] if given else None


class ContentPart(Body):
    """A part of a message; only text is read."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def media(self) -> str | None:
        """The kind of an image, audio or a file; None for text."""
        if self.type in ("text", "input_text", "output_text", "refusal"):
            return None
        return self.type.removeprefix("input_").removesuffix("_url")[:40]

    def read(self) -> str:
        """The text, or a line in place of an image, audio or a file."""
        return instead_of(self.media) if self.media else self.text or self.refusal or ""


Content = str | list[ContentPart] | None


class Function(Body):
    """A function: of a tool, of an earlier call (with arguments), or by its name alone."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    arguments: str | dict[str, Any] = "{}"  # an object in Ollama's API

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


def read_message(role: str, content: Content, separator: str) -> dict[str, Any]:
    """A message as chat templates take it; see `GenerationRequest.prompt`."""
    media = [part.media for part in content if part.media] if isinstance(content, list) else []
    text = read_content(content, separator)
    return {"role": role, "content": text, **({"media": media[0]} if media else {})}


def read_content(content: Content, separator: str) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return separator.join(part.read() for part in content)
    return content or ""


def template_call(id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """An earlier call as chat templates take it: arguments are an object."""
    try:
        value = from_json(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    if not isinstance(value, dict):  # the model wrote what is not JSON
        value = {"arguments": arguments}
    return {"id": id, "type": "function", "function": {"name": name, "arguments": value}}


def thinking_settings(effort: str | bool | None) -> dict[str, Any]:
    """The chat template's variables for a reasoning effort, or for thinking at all."""
    if effort is None:
        return {}
    if isinstance(effort, bool):
        return {"enable_thinking": effort}
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": effort, "enable_thinking": True}
