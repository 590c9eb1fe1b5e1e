"""Groups of options: a command takes a dataclass, and Typer sees each of its fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a command by parameters for its fields.

    `chat(*, names: Names, stop: Stop)` becomes `chat(*, model: Model, draft: Draft, stop: Stop)`.
    Annotations and defaults of the fields declare the options, like those of parameters in Typer.
    """
    groups: dict[str, Any] = {}
    parameters = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @wraps(command)
    def grouped(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(grouped)["__signature__"] = Signature(parameters)
    grouped.__annotations__ = {one.name: one.annotation for one in parameters}
    return grouped


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
