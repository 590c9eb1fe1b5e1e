"""The body of a request, read within bounds: bytes, seconds, depth, how many objects it makes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import RETRY_SECONDS, Refusal

DEPTH = 64  # of objects and lists in each other
# While a body is parsed and validated nobody else is answered: a tenth of a second at most.
CONTAINERS = 30_000  # objects and lists
BRACKETS, COMMAS = 200_000, 2_000_000  # anywhere, texts included, which have to be allowed more


@dataclass(frozen=True)
class Bounds:
    """What bodies may take.

    Attributes:
        bytes: of one.
        seconds: until it is whole.
        together: bytes of all requests that are not answered yet, but for the first ones of each.
        alone: how many these are, so that whoever sends little has never to wait for others.
    """

    bytes: int = 32 * 2**20
    seconds: float = 30.0
    together: int = 128 * 2**20
    alone: int = 2**18


class Bodies:
    """Counts the bytes of the bodies of all requests, from their first one to the answer's end.

    Args:
        app: what reads them.
        bounds: of all together.
    """

    def __init__(self, app: ASGIApp, bounds: Bounds) -> None:
        self._app, self._bounds, self._held = app, bounds, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through. Reading on raises `Refusal` where there is no room for more."""
        held = length = 0

        async def counted() -> Message:
            nonlocal held, length
            message = await receive()
            length += len(message.get("body", b""))
            more = max(0, length - self._bounds.alone) - held
            if more and self._held + more > self._bounds.together:
                raise Refusal(
                    "Too many large requests are open: try again later.",
                    503,
                    retry_after=RETRY_SECONDS,
                )
            held, self._held = held + more, self._held + more
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= held


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


async def _read(request: Request, bounds: Bounds) -> bytearray:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > bounds.bytes:
            raise _too_large(bounds)
    return content


def _too_large(bounds: Bounds) -> Refusal:
    return Refusal(f"The body is larger than {bounds.bytes:,} bytes.", 413)


def parse_object(content: bytes | bytearray) -> dict[str, Any]:
    """The object that a JSON text is. Raises `Refusal`."""
    brackets = content.count(b"[") + content.count(b"{")
    if brackets > BRACKETS or content.count(b",") > COMMAS:
        raise Refusal(f"The body has more than {BRACKETS:,} brackets or {COMMAS:,} commas.", 413)
    try:
        value = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(f"The body is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise Refusal("The body must be a JSON object.")
    if brackets > DEPTH:  # fewer are neither too many nor too deep, however many values they hold
        _check_containers(value)
    return value


def _check_containers(value: dict[str, Any]) -> None:
    """Count objects and lists, a level after the other. Raises `Refusal` for too many or deep."""
    level: list[Any] = [value]
    count = 0
    for _ in range(DEPTH):
        count += len(level)
        if count > CONTAINERS:
            raise Refusal(f"The body has more than {CONTAINERS:,} objects and lists.", 413)
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise Refusal(f"The body is nested deeper than {DEPTH}.")
