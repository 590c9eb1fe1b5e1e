"""Values of the types with which the SDKs of OpenAI and Anthropic describe a conversation."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel
from typing_extensions import TypeAliasType, is_typeddict

DEPTH = 6  # the deepest nesting to build, because types refer to each other in cycles
_WRAPPERS = (Annotated, Required, NotRequired)
_PLAIN = {bool: True, int: 1, float: 1.0, type(None): None}


def members(kind: Any) -> list[Any]:
    """The member types of a union, including those of nested unions."""
    if isinstance(kind, TypeAliasType):
        return members(kind.__value__)
    if get_origin(kind) in _WRAPPERS:
        return members(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return [member for part in get_args(kind) for member in members(part)]
    return [kind]


def fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The fields of a TypedDict or a model: their types, and whether they are required."""
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        required = kind.__required_keys__
        types = {}
        for name, hint in hints.items():
            is_required = name in required or get_origin(hint) is Required
            types[name] = hint, is_required and get_origin(hint) is not NotRequired
        return types
    models = kind.model_fields.items()
    return {field.alias or name: (field.annotation, field.is_required()) for name, field in models}


def is_object(kind: Any) -> bool:
    """Whether a type describes objects with known fields."""
    return is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel))


class Builder:
    """Builds values in which every text is a unique word."""

    def __init__(self) -> None:
        self._numbers = count()

    def word(self) -> str:
        """A text that no other value has."""
        return f"word{next(self._numbers)}x"

    def values(self, kind: Any, depth: int = 0) -> list[Any]:
        """Values of a type that together contain each type within it at least once."""
        return [value for part in members(kind) for value in self._values(part, depth)]

    def _values(self, kind: Any, depth: int) -> list[Any]:
        origin = get_origin(kind)
        inner = get_args(kind)
        if kind is str:
            return [self.word()]
        if kind in _PLAIN:
            return [_PLAIN[kind]]
        if kind in (object, Any) or origin in (dict, Mapping):
            return [{"key": self.word()}]
        if origin is Literal:
            return [inner[0]]
        if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Iterable)):
            return [self.values(inner[0], depth + 1)] if depth < DEPTH else [[]]
        if not is_object(kind):
            return []  # a file on the client's machine
        if depth >= DEPTH:
            return []
        required = () if depth else self._objects(kind, depth, False)
        return [*self._objects(kind, depth, True), *required]

    def _objects(self, kind: Any, depth: int, whole: bool) -> Iterator[dict[str, Any]]:
        """Objects of a type that together contain all types of its fields.

        whole: with all fields, or with the required ones only.
        """
        options = {
            name: self.values(hint, depth + 1)
            for name, (hint, is_required) in fields(kind).items()
            if whole or is_required
        }
        for turn in range(max(map(len, options.values()), default=0)):
            row = {name: values[turn % len(values)] for name, values in options.items() if values}
            yield row


def texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each word of a value, with its path: the keys and the values of `type` that lead to it."""
    if isinstance(value, dict):
        kind = (str(value["type"]),) if "type" in value else ()
        for name, item in value.items():
            yield from texts(item, (*path, *kind, name))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, path)
    elif isinstance(value, str) and value.startswith("word"):
        yield path, value
