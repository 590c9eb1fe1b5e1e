"""Options that belong together: a command takes them as one dataclass, Typer sees every field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its dataclass parameters, in their place, as parameters.

    `chat(*, names: Names, stop: Stop)` becomes `chat(*, model: Model, draft: Draft, stop: Stop)`. A
    field's annotation and default say what the option is, as a parameter's do in Typer.
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
    def gathered(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(gathered)["__signature__"] = Signature(parameters)
    gathered.__annotations__ = {one.name: one.annotation for one in parameters}
    return gathered


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
