"""One internal request, whatever the dialect it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import Refusal

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name, description: as the client says; the model reads both.
        parameters: the JSON schema of its arguments.
        strict: whether its arguments must fit the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Ask:
    """What a client wants to know, and how.

    Attributes:
        model: the name it was asked under, which the answer repeats.
        prompt: messages as chat templates expect them, text to be continued, or token ids.
        settings: of `Engine.submit`, those that the client named.
        tools: what may be called, unless `choice` is "none".
        choice: whether the model decides ("auto") or has to call one ("required").
        allowed: names of the tools that may be called; None allows all.
        parallel: whether it may call several at once.
        schema: the JSON schema of the answer; None leaves it free.
        n: how many answers.
        top_logprobs: how many likely tokens to tell for each of the answer's; None tells nothing.
        template: settings of the model's own chat template, such as `enable_thinking`.
        continues: whether the answer goes on with the last message, which is the assistant's.
        origin: the field of the request that the prompt came in.
    """

    model: str
    prompt: str | list[int] | list[dict[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    choice: Choice = "auto"
    allowed: frozenset[str] | None = None
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    n: int = 1
    top_logprobs: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    origin: str = "messages"

    def __post_init__(self) -> None:
        names = {tool.name for tool in self.tools}
        if len(names) < len(self.tools):
            raise Refusal("Two tools have the same name.", param="tools")
        if self.allowed is not None and (missing := sorted(self.allowed - names)):
            raise Refusal(f"There is no tool {missing[0]!r} among tools.", param="tool_choice")
        if self.choice == "required" and not self.tools:
            raise Refusal("A tool is to be called, and tools is empty.", param="tool_choice")
        if self.choice == "required" and self.schema is not None:
            raise Refusal(
                "A call is required, which a response format cannot shape too.", param="tool_choice"
            )

    @property
    def goes_on(self) -> bool:
        """Whether the answer is the rest of a text, spaces at its beginning included."""
        return self.continues or self.origin == "prompt"

    @property
    def callable(self) -> list[Tool]:
        """The tools that may be called."""
        if self.choice == "none":
            return []
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]


def given(**settings: Any) -> dict[str, Any]:
    """The settings that a client named; the others are the server's."""
    return {name: value for name, value in settings.items() if value is not None}
