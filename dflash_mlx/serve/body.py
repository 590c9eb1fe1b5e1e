"""The body of a request, read within bounds: bytes, seconds, depth, how many objects it makes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from .errors import Refusal

DEPTH = 64  # of objects and lists in each other
CONTAINERS = 1_000_000  # objects and lists: one of two bytes takes 56 in memory


@dataclass(frozen=True)
class Bounds:
    """How large a body may be, in bytes, and how long it may take, in seconds."""

    bytes: int = 32 * 2**20
    seconds: float = 30.0


async def read_json(request: Request, bounds: Bounds) -> dict[str, Any]:
    """The JSON object that a request brings.

    Raises `Refusal`: 413 too large (said before it is read, where its length is known), 408 too
    slow, 415 not JSON by its header, 400 not JSON, nested too deeply, or no object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # so no form of another site's page can ask without a preflight
        raise Refusal("Content-Type must be application/json.", 415)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > bounds.bytes:
        raise _too_large(bounds)
    try:
        async with asyncio.timeout(bounds.seconds):
            content = await _read(request, bounds)
    except TimeoutError as error:
        raise Refusal(f"The body took more than {bounds.seconds:.0f} s.", 408) from error
    except ClientDisconnect as error:
        raise Refusal("The client left before its body was whole.") from error
    return await asyncio.to_thread(parse_object, content)


async def _read(request: Request, bounds: Bounds) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > bounds.bytes:
            raise _too_large(bounds)
    return bytes(content)


def _too_large(bounds: Bounds) -> Refusal:
    return Refusal(f"The body is larger than {bounds.bytes:,} bytes.", 413)


def parse_object(content: bytes) -> dict[str, Any]:
    """The object that a JSON text is. Raises `Refusal`."""
    if content.count(b"[") + content.count(b"{") > CONTAINERS:
        raise Refusal(f"The body has more than {CONTAINERS:,} objects and lists.", 413)
    try:
        value = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(f"The body is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise Refusal("The body must be a JSON object.")
    if _deeper(value, DEPTH):
        raise Refusal(f"The body is nested deeper than {DEPTH}.")
    return value


def _deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return False
    return True
