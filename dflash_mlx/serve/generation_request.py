"""The internal form of a generation request, which is the same for all APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .http_errors import RequestError

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name, description: what the model reads.
        parameters: the JSON schema of the arguments.
        strict: whether the arguments must fit the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Convert the tool for a chat template."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate, and how.

    Attributes:
        model: the name in the request; later the name of the model that answers.
        prompt: chat messages for a template, a text to continue, or token ids. A message with an
            image or other media has a line in its place, the kind of media as `media`, and words
            for everything that a text model cannot read as `left_out`.
        settings: settings of `Engine.submit` that the client named.
        tools: all tools; `callable_tools` are those that may be called.
        tool_choice: whether the model decides to call ("auto"), must not or must.
        allowed_tools: names of the tools that may be called; None allows all.
        parallel_calls: whether the model may make several calls at once.
        schema: the JSON schema of the answer, or None.
        n: the number of answers.
        top_logprobs: how many likely tokens to report for each position; None reports no
            log-probabilities.
        template_settings: variables of the chat template, such as `enable_thinking`.
        continues_message: whether the answer continues the last message, the assistant's.
        prompt_field: the field of the request that contains the prompt.
        ignored: names of what the server ignores; a response header lists them.
    """

    model: str
    prompt: str | list[int] | list[dict[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    allowed_tools: frozenset[str] | None = None
    parallel_calls: bool = True
    schema: Mapping[str, Any] | None = None
    n: int = 1
    top_logprobs: int | None = None
    template_settings: Mapping[str, Any] = field(default_factory=dict)
    continues_message: bool = False
    prompt_field: str = "messages"
    ignored: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Refuse media in a new message of the user. In earlier messages and in results of tools,
        # which some clients send as the user's, media stay lines: otherwise an agent that has seen
        # an image could never go on.
        last_two = [message for message in self.prompt[-2:] if isinstance(message, dict)]
        if last_two:
            last = last_two[-1]
            is_new = last["role"] == "user" and last_two[0]["role"] != "tool"
            if is_new and "media" in last:
                raise RequestError(
                    f"Content of type {last['media']!r} is not supported: this model reads text "
                    "only."
                )
        names = {tool.name for tool in self.tools}
        if len(names) < len(self.tools):
            raise RequestError("Two tools have the same name.", param="tools")
        missing = sorted((self.allowed_tools or frozenset()) - names)
        if missing:
            raise RequestError(f"tools has no tool {missing[0]!r}.", param="tool_choice")
        if self.tool_choice == "required" and not self.tools:
            raise RequestError("A call is required, but tools is empty.", param="tool_choice")

    @property
    def left_out(self) -> list[str]:
        """Words for the parts of messages that a text model cannot read."""
        words = []
        for message in self.prompt:
            if isinstance(message, dict):
                words += [f"content {word}" for word in message.get("left_out", ())]
        return words

    @property
    def continues_text(self) -> bool:
        """Whether the answer continues a text, so that a leading space is kept."""
        return self.continues_message or self.is_raw

    @property
    def is_raw(self) -> bool:
        """Whether the answer is the model's unparsed text, including thoughts."""
        return self.prompt_field == "prompt"

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        allowed = self.allowed_tools
        return [tool for tool in self.tools if allowed is None or tool.name in allowed]


def has_beginning(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a chat ends with text of the assistant, which the answer continues."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last


def media_placeholder(media: str) -> str:
    """Return the line that a text model reads in place of an image, a file or audio."""
    return f"[{media}: this model reads text only]"
