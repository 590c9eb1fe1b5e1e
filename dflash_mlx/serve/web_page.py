"""The page to chat on, and what renders its answers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .body import Body, read_body
from .errors import RequestError

MAX_CHARACTERS: Final = 100_000
FOLDER: Final = Path(__file__).parent


class RenderBody(Body):
    """POST /page/render"""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]


class MarkdownProcess:
    """Renders Markdown in a process, which starts with the first text.

    A text that hangs ends the process, and neither the event loop nor decoding waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, text: str) -> str:
        """The HTML of a text. Raises `RequestError` if it takes too long."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None and stdout is not None
            stdin.write(json.dumps(text).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
            if not line:
                self._process.wait()
                raise RequestError("This text takes too long to render.")
            return str(json.loads(line))

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", FOLDER / "markdown.py", json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


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
        self._markdown = MarkdownProcess()

    def _hash(self, tag: str) -> str:
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", self._html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest())
        return f"'sha256-{digest.decode()}'"

    async def page(self, request: Request) -> Response:
        """The page itself."""
        media_type = "text/html; charset=utf-8"
        return Response(self._html, media_type=media_type, headers=self._headers)

    async def render(self, request: Request) -> Response:
        """The HTML of a Markdown text, which nothing in the text can make load or run."""
        body = await read_body(request, RenderBody)
        html = await run_in_threadpool(self._markdown.render, body.text)
        return JSONResponse({"html": html})
