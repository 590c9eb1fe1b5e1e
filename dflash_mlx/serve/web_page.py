"""The chat page, and the Markdown renderer for its answers."""

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
from .http_errors import RequestError
from .markdown import render

MAX_CHARACTERS: Final = 100_000
RENDER_SECONDS: Final = 2.0  # how long rendering one text may take
FOLDER: Final = Path(__file__).parent


class RenderBody(Body):
    """POST /page/render"""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]


class WebPage:
    """The page: one file. Its policy allows only its own script, its own style and its server."""

    def __init__(self) -> None:
        folder = FOLDER / "page"
        # Comments like /* page.css */ stand for files.
        self._html = re.sub(
            r"/\* ([a-z]+\.(?:css|js)) \*/\n",
            lambda match: (folder / match[1]).read_text("utf-8"),
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
        """Return the hash of a tag's content, in the syntax of a content security policy."""
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", self._html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest())
        return f"'sha256-{digest.decode()}'"

    async def page(self, request: Request) -> Response:
        """Return the page. Clients that are not browsers get Ollama's text at this path."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Ollama is running")
        media_type = "text/html; charset=utf-8"
        return Response(self._html, media_type=media_type, headers=self._headers)

    async def render(self, request: Request) -> Response:
        """Return the HTML of a Markdown text. It cannot load or run anything."""
        body = await read_body(request, RenderBody)
        try:
            html = await run_in_threadpool(run_within, RENDER_SECONDS, partial(render, body.text))
        except TimeoutError as error:
            message = f"This text takes longer than {RENDER_SECONDS:g} seconds."
            raise RequestError(message) from error
        return JSONResponse({"html": html})
