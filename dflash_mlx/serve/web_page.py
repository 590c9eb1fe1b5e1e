"""The page to chat on, and what renders its answers."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..deadline import run_within
from .body import Body, read_body
from .errors import RequestError
from .markdown import render

MAX_CHARACTERS: Final = 100_000
SECONDS: Final = 2.0  # for the HTML of a text
FOLDER: Final = Path(__file__).parent


class RenderBody(Body):
    """POST /page/render"""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]


class WebPage:
    """The page: one file, whose policy allows its own script and style, and its own server."""

    def __init__(self) -> None:
        folder = FOLDER / "page"
        self._html = re.sub(
            r"/\* ([a-z]+\.(?:css|js)) \*/\n",
            lambda found: (folder / found[1]).read_text("utf-8"),
            (folder / "index.html").read_text("utf-8"),
        )
        self._headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; script-src {self._hash('script')}; "
                f"style-src {self._hash('style')}; connect-src 'self'; img-src data:; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    def _hash(self, tag: str) -> str:
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", self._html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest())
        return f"'sha256-{digest.decode()}'"

    async def page(self, request: Request) -> Response:
        """The page itself; for clients that are no browsers, what Ollama says here."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Ollama is running")
        media_type = "text/html; charset=utf-8"
        return Response(self._html, media_type=media_type, headers=self._headers)

    async def render(self, request: Request) -> Response:
        """The HTML of a Markdown text, which nothing in the text can make load or run."""
        body = await read_body(request, RenderBody)
        try:
            html = await run_in_threadpool(run_within, SECONDS, partial(render, body.text))
        except TimeoutError as error:
            raise RequestError(f"This text takes longer than {SECONDS:g} seconds.") from error
        return JSONResponse({"html": html})
