"""Fields that requests to OpenAI's chat completions and completions share."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import AliasChoices, Field

from .body import Body
from .fields import ModelName, ResponseFormat, SamplingOptions, Schema
from .http_errors import RequestError

MAX_CHOICES: Final = 8


class StructuredOutputs(Body):
    """The format of the answer, in vLLM's syntax."""

    unsupported = dict.fromkeys(("choice", "grammar", "regex", "structural_tag"))

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None

    def answer_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, or None for free text."""
        if self.json_ is None and self.json_object:
            return {"type": "object"}
        return self.json_


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class ChoicesBody(SamplingOptions):
    """The fields that chat completions and completions share."""

    unsupported = {
        **SamplingOptions.unsupported,
        **dict.fromkeys(("chat_template", "guided_choice", "guided_grammar", "guided_regex")),
        **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "use_beam_search"), False),
        **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "stop_token_ids"), []),
        **dict.fromkeys(("dry_multiplier", "dynatemp_range", "min_tokens", "prompt_logprobs"), 0),
        "grammar": "",
        "length_penalty": 1,
        "xtc_probability": 0,
        "truncate_prompt_tokens": None,
    }

    model: ModelName = "default"
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    json_schema: Annotated[
        Schema | None, Field(validation_alias=AliasChoices("json_schema", "guided_json"))
    ] = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def answer_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, or None for free text. Raises `RequestError`."""
        format_ = self.response_format
        if format_ and format_.type == "json_schema":
            if not (format_.json_schema or format_.schema_):
                raise RequestError("json_schema is missing.", param="response_format.json_schema")
        structured = self.structured_outputs
        candidates = (
            format_.answer_schema() if format_ else None,
            self.json_schema,
            structured.answer_schema() if structured else None,
        )
        schemas = [schema for schema in candidates if schema is not None]
        if len(schemas) > 1:
            raise RequestError("The request has two schemas for its answer.")
        return schemas[0] if schemas else None
