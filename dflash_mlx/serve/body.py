"""Reads request bodies: JSON with limits on size and time, validated by a pydantic model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json, to_json
from starlette.requests import Request

from .http_errors import RequestError, from_validation

MAX_BYTES: Final = 32 * 2**20
MAX_SECONDS: Final = 30.0
# Content types that litellm and `curl -d` send for JSON. Pages of other sites could send them too,
# so they are refused in requests with an origin.
UNSPECIFIC_TYPES: Final = ("", "application/x-www-form-urlencoded")

Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]  # stops at the first wrong item


class Body(BaseModel):
    """A JSON object of a request.

    Unknown fields are ignored, because clients send the fields of many servers.

    Attributes:
        unsupported: fields that are refused because they would change the answer. Each has the only
            value, other than null, that is allowed.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        for name, allowed in cls.unsupported.items():
            if content.get(name) in (None, allowed):
                continue
            message = "is not supported"
            if allowed is not None:
                message = f"Input should be {to_json(allowed).decode()}"
            raise PydanticCustomError("unsupported", message, {"field": name})
        return content


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, model: type[BodyType]) -> BodyType:
    """Read the body of a request.

    Raises `RequestError`: 415 if the Content-Type is not JSON, 413 if the body is too large, 408 if
    it takes too long, 400 if it is not JSON or does not fit the model. Raises `ClientDisconnect` if
    the client leaves.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_unspecific = media_type in UNSPECIFIC_TYPES and "origin" not in request.headers
    if media_type != "application/json" and not is_unspecific:
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
