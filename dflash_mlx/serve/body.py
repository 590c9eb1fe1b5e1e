"""Request bodies: JSON of bounded size and time, validated by a pydantic model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json, to_json
from starlette.requests import Request

from .errors import RequestError, from_validation

MAX_BYTES: Final = 32 * 2**20
MAX_SECONDS: Final = 30.0
# The types of litellm and of `curl -d`, which name none. A page of another site can send them, but
# not without its origin.
NOT_NAMED: Final = ("", "application/x-www-form-urlencoded")

Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]  # one error, not one per wrong item


class Body(BaseModel):
    """A JSON object of a request.

    Unknown fields are ignored: clients send the fields of many servers.

    Attributes:
        unsupported: fields that would change the answer and are refused, each with the only value
            that it may have beside null.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, content: Any) -> Any:
        for name, only in cls.unsupported.items() if isinstance(content, dict) else ():
            if content.get(name) not in (None, only):
                allowed = to_json(only).decode()
                message = "is not supported" if only is None else f"Input should be {allowed}"
                raise PydanticCustomError("unsupported", message, {"field": name})
        return content


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, model: type[BodyType]) -> BodyType:
    """The body of a request.

    Raises `RequestError`: 415 if the Content-Type is not JSON, 413 if it is too large, 408 if it
    takes too long, 400 if it is not JSON or does not fit the model; and `ClientDisconnect`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and (
        media_type not in NOT_NAMED or "origin" in request.headers
    ):
        raise RequestError("Content-Type must be application/json.", 415)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BYTES:
        raise _too_large()
    content = bytearray()
    try:
        async with asyncio.timeout(MAX_SECONDS):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise RequestError(f"The body took more than {MAX_SECONDS:.0f} s.", 408) from error
    try:
        return model.model_validate(from_json(content, allow_inf_nan=False))
    except ValidationError as error:
        raise from_validation(error) from error
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {str(error)[:200]}") from error


def _too_large() -> RequestError:
    return RequestError(f"The body is larger than {MAX_BYTES:,} bytes.", 413)
