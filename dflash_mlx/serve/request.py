"""A generation request, whichever API it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import RequestError

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
        """The tool as chat templates take it."""
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
        model: the requested name, then that of the model that answers.
        prompt: chat messages as templates take them, a text to continue, or token ids. A message
            that brings an image or other media, as a line, says their kind as `media`, and words
            for all that no model here can read as `left_out`.
        settings: settings of `Engine.submit` that the client named.
        tools: the tools; see `callable_tools`.
        tool_choice: whether a call is up to the model ("auto"), forbidden or required.
        allowed_tools: names of the tools that may be called; None allows all.
        parallel_calls: whether several calls may come at once.
        schema: the JSON schema of the answer, or None.
        n: the number of answers.
        top_logprobs: how many likely tokens to report beside each token; None reports nothing.
        template_settings: variables of the chat template, such as `enable_thinking`.
        continues_message: whether the answer continues the last message, the assistant's.
        prompt_field: the field of the request that holds the prompt.
        ignored: what the request asks for and does not get; a response header names it.
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
        turns = [one for one in self.prompt[-2:] if isinstance(one, dict)]
        # Earlier ones stay lines, and what a tool returned, which some clients send as the user's:
        # an agent could never go on otherwise.
        own = turns and turns[-1]["role"] == "user" and turns[0]["role"] != "tool"
        if own and "media" in turns[-1]:
            kind = turns[-1]["media"]
            message = f"Content of type {kind!r} is not supported: this model reads text only."
            raise RequestError(message)
        names = {tool.name for tool in self.tools}
        if len(names) < len(self.tools):
            raise RequestError("Two tools have the same name.", param="tools")
        if missing := sorted((self.allowed_tools or frozenset()) - names):
            raise RequestError(f"tools has no tool {missing[0]!r}.", param="tool_choice")
        if self.tool_choice == "required" and not self.tools:
            raise RequestError("A call is required, but tools is empty.", param="tool_choice")

    @property
    def left_out(self) -> list[str]:
        """Words for what the messages have and no model here can read."""
        messages = [one for one in self.prompt if isinstance(one, dict)]
        return [f"content {word}" for one in messages for word in one.get("left_out", ())]

    @property
    def continues_text(self) -> bool:
        """Whether the answer continues a text, so that its first space counts."""
        return self.continues_message or self.is_raw

    @property
    def is_raw(self) -> bool:
        """Whether the answer is the text as the model writes it: a thought has no field."""
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


def instead_of(media: str) -> str:
    """The line that a text model reads in place of an image, a file or audio."""
    return f"[{media}: this model reads text only]"
