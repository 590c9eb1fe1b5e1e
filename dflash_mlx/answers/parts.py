"""The parts of an answer: text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call: its id, the tool's name, and its arguments as JSON text."""

    id: str
    name: str
    arguments: str


Part = Text | Reasoning | ToolCall


def joined(parts: Sequence[Part], kind: type[Text | Reasoning]) -> str:
    """Join the text of all parts of a kind."""
    return "".join(part.text for part in parts if isinstance(part, kind))


def merge_texts(parts: Sequence[Part]) -> list[Part]:
    """Merge neighbouring parts of the same kind."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text | Reasoning) and type(last) is type(part):
            merged[-1] = type(part)(last.text + part.text)
        else:
            merged.append(part)
    return merged
