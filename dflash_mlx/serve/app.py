"""The application: its routes, and the page to chat on."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import chat, completions, messages, responses
from .auth import Auth
from .body import read_body
from .errors import RequestError
from .handler import RequestHandler, ResponseStream
from .metrics import CONTENT_TYPE
from .middleware import with_middleware
from .request import GenerationRequest
from .sse import EventStream, unless_disconnected

STALLED_SECONDS: Final = 30.0  # without a decode step, until /health answers 503


class Endpoints:
    """The handlers of the paths.

    Args:
        handler: answers requests.
        name: the model's.
        stalled_seconds: without a decode step, until `/health` answers 503.
    """

    def __init__(
        self, handler: RequestHandler, name: str, stalled_seconds: float = STALLED_SECONDS
    ) -> None:
        self._handler, self._name, self._stalled_seconds = handler, name, stalled_seconds
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await read_body(request, chat.ChatBody)
        (stream,) = await self._start(request, body.generation_request())
        options = body.stream_options
        response = chat.ChatResponse(stream, bool(options and options.include_usage))
        if body.stream:
            return EventStream(response.frames(), response.ping, stream.close)
        return await _complete(request, response.complete(), stream.close)

    async def completions(self, request: Request) -> Response:
        """OpenAI's completions."""
        body = await read_body(request, completions.CompletionsBody)
        streams = await self._start(request, *body.generation_requests())
        response = completions.CompletionsResponse(body, streams)
        if body.stream:
            return EventStream(response.stream_frames(), response.ping, response.close)
        return await _complete(request, response.complete(), response.close)

    async def responses(self, request: Request) -> Response:
        """OpenAI's responses."""
        body = await read_body(request, responses.ResponsesBody)
        (stream,) = await self._start(request, body.generation_request())
        response = responses.ResponsesResponse(body, stream)
        if body.stream:
            return EventStream(response.stream_frames(), response.ping, stream.close)
        return await _complete(request, response.complete(), stream.close)

    async def messages(self, request: Request) -> Response:
        """Anthropic's messages."""
        body = await read_body(request, messages.MessagesBody)
        (stream,) = await self._start(request, body.generation_request())
        if body.stream:
            frames = messages.stream_frames(stream, request.state.request_id)
            return EventStream(frames, lambda: messages.PING, stream.close)
        return await _complete(request, messages.complete(stream), stream.close)

    async def _start(self, request: Request, *wanted: GenerationRequest) -> list[ResponseStream]:
        """Start to answer. A header of the response will name what is ignored."""
        streams = await self._handler.start(wanted, request.state.salt)
        request.state.ignored = streams[0].ignored
        return streams

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's count of a prompt's tokens."""
        body = await read_body(request, messages.CountBody)
        prompt = await self._handler.encode(body.generation_request())
        return JSONResponse({"input_tokens": len(prompt.ids)})

    async def models(self, request: Request) -> Response:
        """The list of models, which has one."""
        content = {"object": "list", "data": [self._model()], "has_more": False}
        return JSONResponse(content | {"first_id": self._name, "last_id": self._name})

    async def model(self, request: Request) -> Response:
        """A model by its name."""
        if request.path_params["name"] != self._name:
            message = f"The only model here is {self._name}; it answers under any name."
            raise RequestError(message, 404, code="model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        """The model in the formats of both APIs."""
        length = self._handler.target.context_length
        return {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "dflash-mlx",
            "type": "model",
            "display_name": self._name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "context_length": length,
            "max_model_len": length,
        }

    async def health(self, request: Request) -> Response:
        """Whether decoding makes progress."""
        seconds = self._handler.seconds_since_step
        stalled = self._handler.lost or seconds > self._stalled_seconds
        status = "stalled" if stalled else "ok"
        content = {"status": status, "seconds_since_round": round(seconds, 3)}
        return JSONResponse(content, 503 if stalled else 200)

    async def ready(self, request: Request) -> Response:
        """Whether the server accepts requests."""
        ready = not self._handler.draining
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        metrics = self._handler.metrics
        metrics.since_step.set(self._handler.seconds_since_step)
        return Response(metrics.text(), media_type=CONTENT_TYPE)


async def _complete(
    request: Request, answer: Coroutine[Any, Any, dict[str, Any]], close: Callable[[], None]
) -> Response:
    """The whole answer; it is cancelled if the client leaves."""
    try:
        return JSONResponse(await unless_disconnected(request, answer))
    finally:
        close()


def _make_page() -> Callable[[Request], Awaitable[Response]]:
    """The handler of the page. Its policy allows its own script and style, and its own server."""
    index, script = (
        files(__package__).joinpath("page", name).read_text("utf-8")
        for name in ("index.html", "conversations.js")
    )
    html = index.replace("/* conversations.js */", script)

    def hashes(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in found)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    headers = {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def page(request: Request) -> Response:
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    return page


def make_app(handler: RequestHandler, name: str, auth: Auth) -> Starlette:
    """The application of one server; `name` is the model's."""
    endpoints = Endpoints(handler, name)
    api: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/chat/completions", endpoints.chat),
        ("POST", "/completions", endpoints.completions),
        ("POST", "/responses", endpoints.responses),
        ("POST", "/messages", endpoints.messages),
        ("POST", "/messages/count_tokens", endpoints.count_tokens),
        ("GET", "/models", endpoints.models),
        ("GET", "/models/{name:path}", endpoints.model),
    ]
    routes = [
        Route(prefix + path, function, methods=[method])
        for prefix in ("/v1", "")
        for method, path, function in api
    ]
    routes += [
        Route("/", _make_page()),
        Route("/health", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/metrics", endpoints.metrics),
    ]
    return with_middleware(routes, auth, handler.metrics)
