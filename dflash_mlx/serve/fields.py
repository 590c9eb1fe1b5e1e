"""What a body may say: fields that count, fields that change nothing, fields that are refused.

A field that would change the answer and is not supported is declared with `Only` and what it may
be without changing anything; one that changes nothing is `Ignored`. A field that is not declared
is one that no dialect knows. So docs/fields.md is made of the models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ..validation import brief

Value = TypeVar("Value")
# Refused at its first wrong value: of each of millions pydantic would write a kilobyte.
Several = Annotated[list[Value], Field(fail_fast=True)]


class Body(BaseModel):
    """What a client sends, or a part of it."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class _Ignored:
    """Marks a field that changes no answer."""


Ignored = Annotated[Any, _Ignored()]


class Only:
    """Marks a field that is not supported: it may be absent, null, or one of these.

    Args:
        neutral: values that ask for nothing.
    """

    def __init__(self, *neutral: Any) -> None:
        self.neutral = (None, *neutral)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """A check after the field's own."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        # 0 == False, which would let a number pass for a switch
        if not any(type(value) is type(one) and value == one for one in self.neutral):
            raise ValueError(f"{brief(value)} is not supported")
        return value


Refused = Annotated[Any, Only()]


def support(model: type[Body]) -> Iterator[tuple[str, str]]:
    """The fields of a body by name: "yes" and its range, "ignored", or what is not refused."""
    schemas = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        said = "yes" + _range(schemas[field.alias or name])
        for mark in field.metadata:
            if isinstance(mark, _Ignored):
                said = "ignored"
            elif isinstance(mark, Only):
                values = ", ".join(f"`{value!r}`" for value in mark.neutral if value is not None)
                said = f"only {values}" if values else "refused"
        yield field.alias or name, said


def _range(schema: dict[str, Any]) -> str:
    """The bounds of a field's values, or of how many they may be, as ", 0 to 2"; mostly none."""
    of = {key: value for one in [*schema.get("anyOf", ()), schema] for key, value in one.items()}
    said = ""
    if (above := of.get("exclusiveMinimum")) is not None:
        said = f"above {above}"
    elif (least := of.get("minimum")) is not None:
        said = f"{least} or more" if "maximum" not in of else f"{least}"
    if (items := of.get("maxItems")) is not None:
        said = f"{items} at most in a list"
    elif (most := of.get("maximum")) is not None:
        said += f" to {most}" if "minimum" in of else f"{', ' * bool(said)}{most} at most"
    return f", {said}" if said else ""
