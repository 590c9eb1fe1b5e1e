"""The application and its routes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final

import mlx.core as mx
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from . import completions, messages, ollama, openai_chat, responses
from .auth import Auth
from .body import read_body
from .generation_request import GenerationRequest
from .metrics import CONTENT_TYPE, Metrics
from .middleware import with_middleware
from .model_info import ollama_details, ollama_entry, openai_entry
from .offered_models import Models
from .response import ApiResponse
from .response_store import ResponseStore
from .sse import EventStream, unless_disconnected
from .steps import ResponseStream
from .web_page import WebPage

STALLED_SECONDS: Final = 30.0  # without a decode step, after which /health answers 503


class Endpoints:
    """The handlers of the paths.

    Args:
        models: the models that answer.
        metrics: the metrics that `/metrics` shows.
        stalled_seconds: seconds without a decode step after which `/health` answers 503.
    """

    def __init__(
        self, models: Models, metrics: Metrics, stalled_seconds: float = STALLED_SECONDS
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._stalled_seconds = stalled_seconds
        self._stored = ResponseStore()

    async def chat(self, request: Request) -> Response:
        """Answer OpenAI's chat completions."""
        body = await read_body(request, openai_chat.ChatBody)
        stream = await self._start(request, body.generation_request())
        response = openai_chat.ChatResponse(stream, body.include_usage)
        return await _respond(request, response, body.stream)

    async def completions(self, request: Request) -> Response:
        """Answer OpenAI's completions."""
        body = await read_body(request, completions.CompletionsBody)
        stream = await self._start(request, *body.generation_requests())
        response = completions.CompletionsResponse(stream, body.include_usage)
        return await _respond(request, response, body.stream)

    async def responses(self, request: Request) -> Response:
        """Answer OpenAI's responses."""
        body = await read_body(request, responses.ResponsesBody)
        salt = request.state.salt
        items = self._stored.conversation(salt, body)
        stream = await self._start(request, body.generation_request(items))
        store = partial(self._stored.add, salt, items)
        response = responses.ResponsesResponse(stream, body, store)
        return await _respond(request, response, body.stream)

    async def stored_response(self, request: Request) -> Response:
        """Return or delete a stored response."""
        salt = request.state.salt
        id = request.path_params["id"]
        if request.method == "DELETE":
            self._stored.remove(salt, id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        return Response(self._stored.get(salt, id), media_type="application/json")

    async def count_input_tokens(self, request: Request) -> Response:
        """Count a prompt's tokens, in OpenAI's format."""
        body = await read_body(request, responses.ResponsesBody)
        items = self._stored.conversation(request.state.salt, body)
        ids = await self._encode(body.generation_request(items))
        content = {"object": "response.input_tokens", "input_tokens": len(ids)}
        return JSONResponse(content)

    async def messages(self, request: Request) -> Response:
        """Answer Anthropic's messages."""
        body = await read_body(request, messages.MessagesBody)
        stream = await self._start(request, body.generation_request())
        response = messages.MessagesResponse(stream, request.state.request_id)
        return await _respond(request, response, body.stream)

    async def ollama(self, request: Request) -> Response:
        """Answer Ollama's chat and generate."""
        is_chat = request.url.path.endswith("chat")
        kind = ollama.OllamaChatBody if is_chat else ollama.OllamaGenerateBody
        body: ollama.OllamaChatBody | ollama.OllamaGenerateBody = await read_body(request, kind)
        start = time.monotonic()
        generation_request = body.generation_request()
        if generation_request is None:
            if body.unloads and await self._models.unload(body.model):
                return JSONResponse(body.without_prompt("unload"))
            model, _ = await self._models.use(body.model)
            return JSONResponse(body.without_prompt("load") | {"model": model.name})
        stream = await self._start(request, generation_request)
        response = ollama.OllamaResponse(stream, body, start)
        return await _respond(request, response, body.stream is not False)

    async def _start(
        self, request: Request, *generation_requests: GenerationRequest
    ) -> ResponseStream:
        """Start to answer. A header of the response will name what is ignored."""
        model, handler = await self._models.use(generation_requests[0].model)
        named = [replace(generation, model=model.name) for generation in generation_requests]
        stream = await handler.start(named, request.state.salt)
        request.state.ignored = stream.ignored
        return stream

    async def _encode(self, generation_request: GenerationRequest) -> list[int]:
        _, handler = await self._models.use(generation_request.model)
        return await handler.encode(generation_request)

    async def count_tokens(self, request: Request) -> Response:
        """Count a prompt's tokens, in Anthropic's format."""
        body = await read_body(request, messages.CountBody)
        ids = await self._encode(body.generation_request())
        return JSONResponse({"input_tokens": len(ids)})

    async def models(self, request: Request) -> Response:
        """List the models, for the clients of OpenAI and Anthropic."""
        entries = list(map(openai_entry, self._models.offered))
        return JSONResponse(
            {
                "object": "list",
                "data": entries,
                "has_more": False,
                "first_id": entries[0]["id"],
                "last_id": entries[-1]["id"],
            }
        )

    async def model(self, request: Request) -> Response:
        """Describe a model, for the clients of OpenAI and Anthropic."""
        return JSONResponse(openai_entry(self._models.find(request.path_params["name"])))

    async def ollama_models(self, request: Request) -> Response:
        """List all models, or those that are loaded, in Ollama's format."""
        models = self._models.offered
        if not request.url.path.endswith("tags"):
            models = [model for model in models if model.handler]
        return JSONResponse({"models": list(map(ollama_entry, models))})

    async def ollama_show(self, request: Request) -> Response:
        """Describe a model in Ollama's format."""
        body = await read_body(request, ollama.OllamaShowBody)
        return JSONResponse(ollama_details(self._models.find(body.model)))

    async def ollama_pull(self, request: Request) -> Response:
        """Answer Ollama's download of a model, which does nothing: all offered models are here."""
        body = await read_body(request, ollama.OllamaPullBody)
        self._models.find(body.model)
        if body.stream is False:
            return JSONResponse({"status": "success"})
        lines = [to_json({"status": status}) for status in ("pulling manifest", "success")]
        media_type = ollama.OllamaResponse.media_type
        return Response(b"\n".join([*lines, b""]), media_type=media_type)

    async def ollama_version(self, request: Request) -> Response:
        """Return the version of Ollama's API."""
        return JSONResponse({"version": ollama.VERSION})

    async def health(self, request: Request) -> Response:
        """Say whether decoding makes progress."""
        seconds = self._models.seconds_since_step
        is_stalled = self._models.lost or seconds > self._stalled_seconds
        status = "stalled" if is_stalled else "ok"
        content = {"status": status, "seconds_since_round": round(seconds, 3)}
        return JSONResponse(content, 503 if is_stalled else 200)

    async def ready(self, request: Request) -> Response:
        """Say whether the server accepts requests."""
        is_ready = not self._models.draining
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics."""
        metrics = self._metrics
        loads = [handler.load for handler in self._models.handlers]
        metrics.since_step.set(self._models.seconds_since_step)
        metrics.running.set(sum(load.running for load in loads))
        metrics.waiting.set(sum(load.waiting for load in loads))
        metrics.prefix_bytes.set(sum(load.prefix_bytes for load in loads))
        metrics.device_bytes.set(mx.get_active_memory())
        return Response(metrics.text(), media_type=CONTENT_TYPE)


async def _respond(request: Request, response: ApiResponse, stream: bool | None) -> Response:
    """Send a response, complete or as a stream. It is cancelled if the client leaves."""
    if stream:
        return EventStream(response)
    try:
        return JSONResponse(await unless_disconnected(request, response.complete()))
    finally:
        response.close()


def make_app(models: Models, auth: Auth, metrics: Metrics) -> Starlette:
    """Make the application of one server."""
    endpoints = Endpoints(models, metrics)
    page = WebPage()
    # Served with and without /v1 before the path.
    api: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/chat/completions", endpoints.chat),
        ("POST", "/completions", endpoints.completions),
        ("POST", "/responses", endpoints.responses),
        ("POST", "/responses/input_tokens", endpoints.count_input_tokens),
        ("GET", "/responses/{id}", endpoints.stored_response),
        ("DELETE", "/responses/{id}", endpoints.stored_response),
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
        Route("/", page.page),
        Route("/page/render", page.render, methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/metrics", endpoints.metrics),
        Route("/api/chat", endpoints.ollama, methods=["POST"]),
        Route("/api/generate", endpoints.ollama, methods=["POST"]),
        Route("/api/show", endpoints.ollama_show, methods=["POST"]),
        Route("/api/pull", endpoints.ollama_pull, methods=["POST"]),
        Route("/api/tags", endpoints.ollama_models),
        Route("/api/ps", endpoints.ollama_models),
        Route("/api/version", endpoints.ollama_version),
    ]
    return with_middleware(routes, auth, metrics)
